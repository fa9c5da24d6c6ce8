"""Token ids and images of requests, computed in worker threads."""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from offload_rt.engine.request_builder import RequestBuilder
from offload_rt.errors import PromptError, SettingsError
from offload_rt.models.image_prompt import EncodedPrompt, ImagePrompt
from offload_rt.server.call_format import CallFormat
from offload_rt.server.derivation import tool_variables
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.text.images import Fetch, has_images

GenerationRequest = CompletionRequest | ChatRequest
# Variables of chat templates and their places in a request.
_KEYWORDS = "chat_template_kwargs"
_VARIABLES = {"tools": "the request", "documents": _KEYWORDS, "functions": _KEYWORDS}
# Each decodes an image at a time, up to 300 MB with a copy.
_IMAGE_THREADS = 2


@dataclass(eq=False)
class PromptEncoder:
    """Converts requests to prompts; without `fetch`, images behind http URLs are refused."""

    requests: RequestBuilder
    fetch: Fetch | None
    tool_format: CallFormat
    _image_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_IMAGE_THREADS, "images")
    )

    async def encode(
        self, request: GenerationRequest, is_checked: bool = True
    ) -> list[EncodedPrompt]:
        """Encode prompts in a worker thread; `is_checked` truncates and verifies prompts."""
        # Images have threads of their own, because they take seconds.
        is_slow = isinstance(request, ChatRequest) and has_images(request.messages)
        threads = self._image_threads if is_slow else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._encode, request, is_checked)

    def _encode(self, request: GenerationRequest, is_checked: bool) -> list[EncodedPrompt]:
        prompts: list[EncodedPrompt] = []
        if isinstance(request, ChatRequest):
            prompts.append(self._render(request))
        else:
            special = request.add_special_tokens
            encode = self.requests.encode
            prompts += [encode(p, special) if isinstance(p, str) else p for p in request.prompt]
        for i, prompt in enumerate(prompts if is_checked else ()):
            if (n := request.truncate_prompt_tokens) is not None:
                if isinstance(prompt, ImagePrompt):
                    need = "a prompt without images"
                    raise SettingsError("truncate_prompt_tokens", need=need, change="leave it out")
                n = self.requests.max_model_len - 1 if n == -1 else n  # leaves room for a token
                prompts[i] = prompt[max(len(prompt) - n, 0) :]
            self.requests.check_prompt(prompts[i])
        return prompts

    def _render(self, request: ChatRequest) -> EncodedPrompt:
        """Encode a conversation. Raises PromptError or SettingsError for input without effect."""
        variables = request.template_variables
        # Clients may set variables of the template, but no template of their own.
        arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        reserved = variables.keys() & arguments.keys() - {"documents"}
        if reserved:
            need = "variables of the model's template"
            raise SettingsError(f"chat_template_kwargs {min(reserved)}", need=need)
        if request.continue_final_message and request.add_generation_prompt:
            need = "add_generation_prompt to be false"
            raise SettingsError("continue_final_message", need=need, change="set it to false")
        template = str(self.requests.tokenizer and self.requests.tokenizer.chat_template)
        wanted = request.wanted_format
        turns, tools = self.tool_format.adapt(request.turns(), request.offered_tools)
        options = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
            **tool_variables(template, tools),
            **variables,
        }
        if wanted and "response_format" in template:
            options["response_format"] = wanted
        if "developer" not in template:  # OpenAI's role of system messages
            turns = [{**t, "role": "system"} if t["role"] == "developer" else t for t in turns]
        try:
            return self.requests.encode_messages(turns, options, self.fetch, reads_files=False)
        except PromptError as error:
            if "--chat-template" not in error.change:
                raise
            missing = [name for name in _VARIABLES if name in template and not options.get(name)]
            need = " or ".join(f"{name} in {_VARIABLES[name]}" for name in missing)
            change = "change the request, or send the whole text to /v1/completions"
            raise PromptError(error.problem, need=need, change=change) from error
