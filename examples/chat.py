"""Hold a conversation. A model without a chat template needs one, here the demo pair."""

from demo import CHAT_TEMPLATE, TARGET

from offload_rt import LLM, SamplingParams

conversation = [{"role": "user", "content": "Why is the sky blue?"}]

with LLM(TARGET, max_model_len=512) as llm:
    for question in ("And why is it red in the evening?", None):
        params = SamplingParams(max_tokens=48)
        (output,) = llm.chat(conversation, params, chat_template=CHAT_TEMPLATE)
        conversation.append({"role": "assistant", "content": output.text})
        if question:
            conversation.append({"role": "user", "content": question})

for message in conversation:
    print(f"{message['role']}: {message['content']!r}")
