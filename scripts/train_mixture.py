"""Train a small mixture of experts whose routers have specialised, for `bench/experts/policy.py`.

A Mixtral of the demo target's attention, embedding and norms; each expert of a layer begins as some
neurons of its MLP, drawn at random (sparse upcycling, Komatsuzaki et al. 2023, of finer experts),
the routers at random. All is trained on the same text, with the loss for balanced routers, layer by
layer:

    python scripts/train_mixture.py /tmp/mixture --minutes 12
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from train_demo import draw_windows, load_model, pack, read_corpus
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

TARGET = Path(__file__).parents[1] / "models" / "demo-target"


def upcycled(
    target: LlamaForCausalLM, n_experts: int, n_used: int, width: int
) -> MixtralForCausalLM:
    """A mixture of the same function on average over the choice of experts."""
    shape = target.config.to_dict() | {
        "num_local_experts": n_experts,
        "num_experts_per_tok": n_used,
    }
    kept = {
        key: shape[key] for key in MixtralConfig().to_dict() if key in shape and key not in _OWN
    }
    config = MixtralConfig(**kept, intermediate_size=width, router_aux_loss_coef=0.0)
    model = MixtralForCausalLM(config).float()
    whole = target.state_dict()
    state = model.state_dict()
    state |= {name: tensor.float() for name, tensor in whole.items() if name in state}
    n_neurons = target.config.intermediate_size
    for i in range(config.num_hidden_layers):
        gate, up, down = (
            whole[f"model.layers.{i}.mlp.{name}_proj.weight"].float()
            for name in ("gate", "up", "down")
        )
        for expert in range(n_experts):
            neurons = torch.randperm(n_neurons)[:width]
            state[f"model.layers.{i}.mlp.experts.gate_up_proj"][expert] = torch.cat(
                [gate[neurons], up[neurons]]
            )
            state[f"model.layers.{i}.mlp.experts.down_proj"][expert] = down[:, neurons] * (
                n_neurons / width
            )
    model.load_state_dict(state)
    return model


_OWN = {
    "architectures",
    "model_type",
    "transformers_version",
    "intermediate_size",
    "sliding_window",
    "router_aux_loss_coef",
}


def train(
    model: MixtralForCausalLM, stream: Tensor, minutes: float, bos: int, balance: float
) -> None:
    """By AdamW, with rates that rise and fall by the clock."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    n = 0
    fraction = 0.0
    while fraction < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, 20 * fraction + 0.02, 1.1 - fraction)
        windows = draw_windows(stream, 8, 256, bos)
        out = model(windows, labels=windows, output_router_logits=True, use_cache=False)
        sizes = model.config.num_local_experts, model.config.num_experts_per_tok
        # Layer by layer; transformers' models take all layers together, which leaves each as skewed
        # as it likes.
        aux = torch.stack(
            [load_balancing_loss_func((logits,), *sizes) for logits in out.router_logits]
        ).mean()
        (out.loss + balance * aux).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        fraction = (time.perf_counter() - started) / 60 / minutes
        if n % 20 == 0:
            print(
                f"{fraction:.3f} step {n}: loss {float(out.loss.detach()):.3f}, balance"
                f" {float(aux.detach()):.2f}",
                flush=True,
            )
        n += 1


def main() -> None:
    """Write the mixture as a checkpoint of Hugging Face."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--used", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="of an expert")
    parser.add_argument(
        "--balance", type=float, default=0.02, help="weight of the loss for balanced routers"
    )
    flags = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    stream = pack(tokenizer, read_corpus(Path(sysconfig.get_paths()["stdlib"])).train)
    model = upcycled(load_model(TARGET, "cpu"), flags.experts, flags.used, flags.width)
    train(model, stream, flags.minutes, tokenizer.bos_token_id, flags.balance)
    model.to(torch.bfloat16).save_pretrained(flags.out)
    tokenizer.save_pretrained(flags.out)


if __name__ == "__main__":
    main()
