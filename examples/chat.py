"""Hold a conversation. The demo pair has no chat template, so the example passes its own."""

from demo import TARGET

from offload_rt import LLM, SamplingParams

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
conversation = [{"role": "user", "content": "Write a function that reads a file."}]

with LLM(TARGET, max_model_len=512) as llm:
    for question in ("Now with an encoding.", None):
        params = SamplingParams(max_tokens=24)
        (output,) = llm.chat(conversation, params, chat_template=TEMPLATE)
        conversation.append({"role": "assistant", "content": output.text})
        if question:
            conversation.append({"role": "user", "content": question})

for message in conversation:
    print(f"{message['role']}: {message['content']!r}")
