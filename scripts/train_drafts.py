"""Train drafts of a chat model on conversations that the model writes itself.

python scripts/train_drafts.py write --target DIR --work DIR --minutes 60
python scripts/train_drafts.py states --target DIR --work DIR
python scripts/train_drafts.py predictions --target DIR --work DIR --out DIR
python scripts/train_drafts.py eagle3 --target DIR --work DIR --minutes 90 --out DIR
python scripts/train_drafts.py block --target DIR --work DIR --minutes 60 --out DIR
python scripts/train_drafts.py model --target DIR --work DIR --minutes 60 --out DIR
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from chat_text import BatchWriter, Turn, conversations
from demo_heads import DFlash, DraftLayers, Eagle3, Taught, save_head, tapped_states
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_demo import Run, save_model, start_from, train
from transformers import AutoTokenizer, LlamaForCausalLM

from offload_rt.speculate.predictions import (
    LONGEST,
    N_PREDICTED,
    PREDICTIONS_FILE,
    write_predictions,
)

# Conversations that are only measured: the first batch.
HELD_OUT = "text-0-00000.safetensors"
# Tokens before the user's turn, which are the same in all conversations.
N_HEADER = 24


def write(args: argparse.Namespace) -> None:
    """Write conversations until the time is over, a file per batch."""
    target = load_target(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    began = time.monotonic()
    n_tokens = 0
    writer = BatchWriter(target, tokenizer.eos_token_id)
    texts = conversations(tokenizer, writer, args.batch, args.answer_tokens)
    for number, turns in enumerate(texts):
        save_turns(turns, args.work / f"text-{args.seed}-{number:05d}.safetensors")
        n_tokens += sum(len(turn.tokens) - turn.n_prompt for turn in turns)
        minutes = (time.monotonic() - began) / 60
        print(f"{n_tokens} tokens of answers in {minutes:.1f} minutes", flush=True)
        if minutes > args.minutes:
            return


def load_target(args: argparse.Namespace) -> LlamaForCausalLM:
    """Load the target without gradients, in bf16 where the device multiplies in it."""
    dtype = torch.bfloat16 if multiplies_bf16(args.device) else torch.float32
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=dtype)
    return target.eval().requires_grad_(False).to(args.device)


def multiplies_bf16(device: str) -> bool:
    """Return whether a device has instructions for bf16; float32 is faster on other CPUs."""
    return device != "cpu" or torch.cpu._is_avx512_bf16_supported()


def save_turns(turns: list[Turn], path: Path) -> None:
    """Write conversations as one stream of tokens with lengths."""
    save(
        path,
        tokens=torch.tensor([token for turn in turns for token in turn.tokens]),
        lengths=torch.tensor([len(turn.tokens) for turn in turns]),
        n_prompt=torch.tensor([turn.n_prompt for turn in turns]),
    )


def save(path: Path, **tensors: Tensor) -> None:
    """Write a file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def states(args: argparse.Namespace) -> None:
    """Store the target's hidden states of all conversations, which training otherwise computes."""
    target = load_target(args)
    for path in sorted(args.work.glob("text-*.safetensors")):
        out = args.work / path.name.replace("text", "states")
        if out.exists():
            continue
        stored = load_file(path)
        rows = stored["tokens"].split(stored["lengths"].tolist())
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        parts: dict[int, Tensor] = {}
        for first in range(0, len(order), 16):
            chosen = order[first : first + 16]
            padded = torch.nn.utils.rnn.pad_sequence([rows[i] for i in chosen], batch_first=True)
            both = tapped_states(target, padded.to(args.device), taps_of(target))
            for i, state in zip(chosen, torch.cat(both, -1).bfloat16().cpu(), strict=True):
                parts[i] = state[: len(rows[i])]
        save(out, states=torch.cat([parts[i] for i in range(len(rows))]))
        print(out.name, flush=True)


def predictions(args: argparse.Namespace) -> None:
    """Store the target's predictions in all answers, from its stored states."""
    output = load_target(args).get_output_embeddings().weight
    contexts, tokens, probs = [], [], []
    for path in sorted(args.work.glob("text-*.safetensors")):
        stored = load_file(path)
        ends = stored["lengths"].cumsum(0)
        starts = ends - stored["lengths"] + stored["n_prompt"] - 1
        is_answer = torch.zeros(len(stored["tokens"]), dtype=torch.bool)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            is_answer[start : end - 1] = True
        last = is_answer.nonzero()
        contexts.append(stored["tokens"][last + torch.arange(1 - LONGEST, 1)])
        states = load_file(path.with_name(path.name.replace("text", "states")))["states"]
        for part in states[is_answer, -output.shape[1] :].split(2048):
            logits = F.linear(part.to(output), output).float()
            best = logits.softmax(-1).topk(N_PREDICTED)
            tokens.append(best.indices.cpu())
            probs.append(best.values.cpu())
        print(path.name, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = (torch.cat(part).numpy() for part in (contexts, tokens, probs))
    write_predictions(args.out / PREDICTIONS_FILE, *parts)


def taps_of(target: LlamaForCausalLM) -> tuple[int, ...]:
    """Return the default taps of EAGLE-3: a low, the middle and a high layer."""
    n = target.config.num_hidden_layers
    return 2, n // 2, n - 3


@dataclass(frozen=True)
class Texts:
    """Conversations in memory, with states in mapped files where they are stored.

    tokens    a tensor per conversation
    places    file and first row of each conversation; None without stored states
    """

    target: LlamaForCausalLM
    tokens: list[Tensor]
    places: list[tuple[Any, int] | None]

    @classmethod
    def read(cls, target: LlamaForCausalLM, paths: list[Path]) -> "Texts":
        """Open files of conversations."""
        texts = cls(target, [], [])
        for path in paths:
            stored = load_file(path)
            texts.tokens.extend(stored["tokens"].split(stored["lengths"].tolist()))
            with_states = path.with_name(path.name.replace("text", "states"))
            if not with_states.exists():
                texts.places.extend([None] * len(stored["lengths"]))
                continue
            slices = safe_open(with_states, "pt").get_slice("states")
            starts = (stored["lengths"].cumsum(0) - stored["lengths"]).tolist()
            texts.places.extend((slices, start) for start in starts)
        return texts

    def batches(self, n_tokens: int) -> Iterator[Taught]:
        """Yield batches of about `n_tokens` tokens of similar length, in random order."""
        lengths = torch.tensor([len(row) for row in self.tokens])
        while True:
            order = (lengths + 24 * torch.rand(len(lengths))).argsort().tolist()
            groups: list[list[int]] = [[]]
            for i in order:
                if (len(groups[-1]) + 1) * len(self.tokens[i]) > n_tokens:
                    groups.append([])
                groups[-1].append(i)
            for at in torch.randperm(len(groups)).tolist():
                yield self.taught(groups[at])

    def taught(self, chosen: list[int]) -> Taught:
        """Return conversations with the target's states; turns of user and target count."""
        rows = [self.tokens[i] for i in chosen]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.target.device)
        is_taught = torch.zeros_like(tokens, dtype=torch.bool)
        for row, text in zip(is_taught, rows, strict=True):
            row[N_HEADER : len(text) - 1] = True
        places = [place for i in chosen if (place := self.places[i])]
        if len(places) < len(chosen):
            taps, final = tapped_states(self.target, tokens, taps_of(self.target))
            return Taught(tokens, taps, final, is_taught)
        dtype = self.target.dtype
        d = self.target.config.hidden_size
        stored = torch.zeros(*tokens.shape, 4 * d, dtype=torch.bfloat16)
        for row, text, (slices, start) in zip(stored, rows, places, strict=True):
            row[: len(text)] = slices[start : start + len(text)]
        stored = stored.to(tokens.device, dtype)
        return Taught(tokens, stored[..., : 3 * d], stored[..., 3 * d :], is_taught)


def train_draft(args: argparse.Namespace) -> None:
    """Distil a draft from the stored states."""
    target = load_target(args)
    paths = sorted(args.work.glob("text-*.safetensors"))
    texts = Texts.read(target, [path for path in paths if path.name != HELD_OUT])
    if not texts.tokens:
        need = f"a file of texts beside {HELD_OUT}, which is held out"
        raise SystemExit(f"{args.work}: training needs {need}; write with more --minutes")
    held_out = Texts.read(target, [args.work / HELD_OUT])
    unseen = held_out.taught(list(range(0, len(held_out.tokens), 4)))
    if args.start and args.stage == "eagle3":
        known = vocabulary_of(args.start)
    else:
        known = frequent_tokens(texts, args.vocabulary)
    draft: DFlash | DraftLayers | Eagle3
    if args.stage == "block":
        draft = DFlash(target, taps_of(target), args.layers, known)
    elif args.stage == "model":
        draft = DraftLayers(target, args.layers, known)
    else:
        draft = Eagle3(target, taps_of(target), known)
    draft.float().to(args.device)
    n = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    print(f"{n} trained parameters", flush=True)
    if args.start:
        start_from(draft, args.start)
    batches = texts.batches(args.batch_tokens)
    precision = torch.autocast(args.device, torch.bfloat16, enabled=multiplies_bf16(args.device))

    def loss_at(_: float) -> Tensor:
        with precision:
            return draft.loss(target, next(batches))

    def save_draft() -> None:
        if isinstance(draft, DraftLayers):
            save_model(draft.llama, AutoTokenizer.from_pretrained(args.target), args.out)
        else:
            save_head(draft, target, args.out)

    def check() -> float:
        save_draft()
        with torch.no_grad(), torch.random.fork_rng(), precision:
            torch.manual_seed(0)
            return draft.loss(target, unseen).item()

    args.out.mkdir(parents=True, exist_ok=True)
    rates = args.rate * 6e-3, args.rate * 2e-3
    checkpoint = args.work / f"{args.stage}.weights"
    run = Run(args.minutes, checkpoint, *rates, report_s=120, compiles=False)
    train(draft, loss_at, run, check)
    print(f"held out {check():.4f}")


def vocabulary_of(path: Path) -> Tensor:
    """Return the predicted tokens (n,) of a written EAGLE-3 head."""
    with safe_open(path, "pt") as file:
        offsets: Tensor = file.get_tensor("d2t")
    return offsets + torch.arange(len(offsets))


def frequent_tokens(texts: Texts, n: int) -> Tensor:
    """Return the `n` most frequent tokens (n,) of the conversations, ascending."""
    counts = torch.bincount(torch.cat(texts.tokens), minlength=n)
    print(f"{counts.topk(n).values.sum() / counts.sum():.4f} of the text in the vocabulary")
    return counts.topk(n).indices.sort().values


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = {
        "write": write, "states": states, "predictions": predictions,
        "eagle3": train_draft, "block": train_draft, "model": train_draft,
    }  # fmt: skip
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens that drafts learn")
    parser.add_argument("--layers", type=int, default=2, help="layers of block or model")
    parser.add_argument("--start", type=Path, help="model.safetensors of a head to continue from")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
