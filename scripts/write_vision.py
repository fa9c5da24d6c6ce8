"""Write a tiny random vision-language model with tokenizer and processor.

Its answers have no meaning. Tests and examples need no download.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "demo-target"
SIDE = 32
PATCH = 8
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: "
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def write_vision(path: Path, seed: int = 0) -> None:
    """Write the model to a directory."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_id)
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        is_norm = parameter.dim() == 1 and bool(parameter.mean() == 1)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = is_norm + 0.2 * noise
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    settings = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (path / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    write_vision(parser.parse_args().out)
