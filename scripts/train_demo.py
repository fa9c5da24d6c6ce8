"""Train the demonstration pair, models/demo-target and models/demo-draft, on CPython's own standard
library.

The target is a small Llama trained on the source; the draft, under a fifth of its size, is
distilled from the target's full distribution, half on the source and half on text which the target
wrote. Both stages stop by the clock:

    python scripts/train_demo.py --target-minutes 55 --draft-minutes 30
    python scripts/train_demo.py --stages draft evaluate --draft-minutes 30
    python scripts/train_demo.py --stages evaluate
"""

import argparse
import copy
import json
import math
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from demo_heads import DEMO_TAPS, DFlash, Eagle3, save_head, taught
from muon import Muon
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HELD_OUT = (
    (Path(__file__).parents[1] / "models" / "held_out.txt").read_text(encoding="utf-8").split()
)
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
# Data, not program text: the encodings' tables, pydoc's topics and the like are a third of the
# bytes.
TABLES = ("encodings/", "pydoc_data/", "html/entities.py", "_sysconfigdata", "config-")
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
# Small, because the few million tokens of an hour on two cores are short of steps rather than of
# batch size.
TOKENS_PER_BATCH = 4096


def window_length(fraction: float) -> int:
    """Return the tokens of a training window when `fraction` of the time has gone: at the end the
    whole context.
    """
    return 512 if fraction < 0.85 else 1024


@dataclass(frozen=True)
class Corpus:
    """The texts that are trained on and the texts that are held out, one string a module."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One training run by the clock: rates rise over `warmup` of the time and fall to zero at its
    end.
    """

    minutes: float
    checkpoint: Path
    muon_lr: float
    adam_lr: float
    weight_decay: float = 0.1
    warmup: float = 0.02
    report_s: float = 60.0
    compiles: bool = True

    def scale(self, fraction: float) -> float:
        """Return the factor on the learning rates when `fraction` of the time has gone."""
        if fraction < self.warmup:
            return fraction / self.warmup + 0.01
        return 0.5 * (1 + math.cos(math.pi * (fraction - self.warmup) / (1 - self.warmup)))


def read_corpus(stdlib: Path) -> Corpus:
    """Read the standard library's modules in the order of their names, without tests and data
    tables.
    """
    train = []
    held_out = []
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")) or name.startswith(TABLES):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out if name in HELD_OUT else train).append(text)
    return Corpus(tuple(train), tuple(held_out))


def train_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """Train a byte-level BPE tokenizer which puts one bos before every encoding and decodes byte
    for byte.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bos = (END_OF_TEXT, bpe.token_to_id(END_OF_TEXT))
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[bos]
    )
    return bpe


def wrap_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the tokenizer the names and settings that are saved with both models."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]) -> Tensor:
    """Return all texts as one stream, (n,) int64, with the end-of-text token between them and at
    both ends.
    """
    ids = [token for text in texts for token in tokenizer(text, verbose=False).input_ids]
    return torch.tensor([*ids, tokenizer.eos_token_id])


def draw_windows(stream: Tensor, rows: int, length: int, bos: int) -> Tensor:
    """Draw windows at random offsets, (rows, length); in half of them the first token is replaced
    by bos.
    """
    starts = torch.randint(0, len(stream) - length + 1, (rows, 1))
    windows = stream[starts + torch.arange(length)]
    windows[torch.rand(rows) < 0.5, 0] = bos
    return windows


def build_model(tokenizer: PreTrainedTokenizerFast, *, draft: bool) -> LlamaForCausalLM:
    """Build the target or the draft with fresh weights; the embedding is tied to the output in
    both.
    """
    shape = (128, 3, 4, 2, 256) if draft else (256, 6, 8, 4, 640)
    hidden, layers, heads, kv_heads, intermediate = shape
    eos = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        bos_token_id=eos,
        eos_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)
    return model


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model directory in bf16 beside its place, then put it there, so that a stop leaves no
    damaged one.
    """
    partial = out.with_name(out.name + ".partial")
    previous = out.with_name(out.name + ".previous")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)
    copy.deepcopy(model).cpu().to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        with path.open("rb+") as written:
            os.fsync(written.fileno())
    if out.exists():
        out.rename(previous)
    partial.rename(out)
    shutil.rmtree(previous, ignore_errors=True)


def load_model(path: Path, device: str) -> LlamaForCausalLM:
    """Load a saved directory as it was written, in bf16."""
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()


def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the logits (rows, length, vocabulary) in float32; products run in bf16."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return model(tokens, use_cache=False).logits.float()


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of each token given those before it."""
    return F.cross_entropy(logits_of(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean KL divergence, in nats, of the draft from the target over the whole
    vocabulary.
    """
    with torch.no_grad():
        wanted = logits_of(target, tokens).log_softmax(-1)
    got = logits_of(draft, tokens).log_softmax(-1)
    return F.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)


def make_optimizers(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    tables = ("embed", "lm_head")
    is_matrix = [p.ndim == 2 and not any(part in name for part in tables) for name, p in named]
    matrices = [p for (_, p), yes in zip(named, is_matrix, strict=True) if yes]
    others = [p for (_, p), yes in zip(named, is_matrix, strict=True) if not yes]
    return [
        Muon(matrices, run.muon_lr, run.weight_decay),
        torch.optim.AdamW(others, lr=run.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: nn.Module, loss_at: Callable[[float], Tensor], run: Run, check: Callable[[], float]
) -> None:
    """Train until the run's time is over.

    loss_at  gives the loss of one fresh batch, from the share of the time that has gone
    check    gives the figure reported now and then; the weights are checkpointed at the same
             moments
    """
    optimizers = make_optimizers(model, run)
    if run.compiles and run.minutes > 0:
        # Measured on two cores: twice the tokens a second, as most of a small model's time is
        # elementwise work.
        model.compile(dynamic=False)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    began = reported = time.monotonic()
    step = 0
    while (fraction := (time.monotonic() - began) / max(run.minutes * 60, 1e-9)) < 1:
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * run.scale(fraction)
        loss = loss_at(fraction)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if time.monotonic() - reported > run.report_s:
            print(
                f"{fraction:6.1%} step {step} loss {loss.item():.3f} held out {check():.3f}",
                flush=True,
            )
            save_weights(model, run.checkpoint)
            reported = time.monotonic()


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the float32 weights to one file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    save_file(
        {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}, partial
    )
    partial.rename(path)


def start_from(model: nn.Module, path: Path) -> None:
    """Load weights that save_weights wrote; the tied output follows the embedding."""
    model.load_state_dict(load_file(path), strict=False)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: Tensor, n_windows: int | None = None) -> float:
    """Return the loss in nats over consecutive windows of 1024 tokens, the first `n_windows` or
    all.
    """
    windows = stream[: len(stream) // 1024 * 1024].view(-1, 1024)[:n_windows]
    losses = [
        next_token_loss(model, part.to(model.device)).item() * len(part)
        for part in windows.split(4)
    ]
    return sum(losses) / len(windows)


@torch.no_grad()
def continue_text(
    model: LlamaForCausalLM, prompts: Tensor, n_new: int, temperatures: Tensor
) -> Tensor:
    """Continue every row by `n_new` tokens, past any end-of-text token.

    prompts       (rows, length)
    temperatures  (rows,), 0 for the most probable token
    Returns (rows, length + n_new).
    """
    cache = DynamicCache(config=model.config)
    rows = last = prompts.to(model.device)
    for _ in range(n_new):
        logits = (
            model(last, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1]
            .float()
        )
        # argmax(logits + T * Gumbel noise) draws from softmax(logits / T), and T = 0 is the greedy
        # choice.
        noise = torch.empty_like(logits).exponential_().log().neg()
        last = (logits + temperatures.to(logits.device)[:, None] * noise).argmax(-1, keepdim=True)
        rows = torch.cat((rows, last), dim=1)
    return rows


def write_text(
    target: LlamaForCausalLM, stream: Tensor, minutes: float, n_rows: int, bos: int
) -> Tensor:
    """Let the target continue prompts from the corpus until `n_rows` rows or the minutes are full.

    Half of the rows are greedy, half at a temperature from 0.6 to 1. Returns (rows, 256), at least
    one batch.
    """
    batch = 128
    length = 256
    written = []
    began = time.monotonic()
    while not written or (
        len(written) * batch < n_rows and time.monotonic() - began < minutes * 60
    ):
        n_prompt = int(torch.randint(1, 65, ()))
        prompts = draw_windows(stream, batch, n_prompt, bos)
        temperatures = 0.6 + 0.4 * torch.rand(batch)
        temperatures[: batch // 2] = 0.0
        written.append(continue_text(target, prompts, length - n_prompt, temperatures).cpu())
        print(
            f"the target wrote {len(written) * batch} rows in {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return torch.cat(written)


def written_text(
    args: argparse.Namespace, target: LlamaForCausalLM, stream: Tensor, bos: int
) -> Tensor:
    """Read the text which the target wrote for an earlier stage, or let it write for a third of
    the draft's time.
    """
    path = args.work / "written.safetensors"
    if not path.exists():
        rows = write_text(target, stream, args.draft_minutes / 3, args.written_rows, bos)
        save_file({"tokens": rows}, path)
    return load_file(path)["tokens"]


def train_target(args: argparse.Namespace, corpus: Corpus) -> None:
    """Train the tokenizer and the target and save both; see `window_length` for its windows."""
    tokenizer = wrap_tokenizer(train_tokenizer(corpus.train))
    stream = pack(tokenizer, corpus.train)
    held_out = pack(tokenizer, corpus.held_out)
    print(
        f"{len(corpus.train)} modules, {len(stream)} tokens; held out {len(held_out)} tokens",
        flush=True,
    )
    model = build_model(tokenizer, draft=False).to(args.device)
    if args.start_target:
        start_from(model, args.start_target)

    def loss_at(fraction: float) -> Tensor:
        length = window_length(fraction)
        windows = draw_windows(stream, TOKENS_PER_BATCH // length, length, tokenizer.bos_token_id)
        return next_token_loss(model, windows.to(args.device))

    run = Run(
        args.target_minutes, args.work / "target.safetensors", args.rate * 3e-3, args.rate * 2e-3
    )
    train(model, loss_at, run, lambda: held_out_loss(model, held_out, 8))
    save_model(model, tokenizer, args.out / "demo-target")
    (args.work / "written.safetensors").unlink(missing_ok=True)


def train_draft(args: argparse.Namespace, corpus: Corpus) -> None:
    """Distil the draft from the saved target; a third of the time goes into the text which the
    target writes.
    """
    tokenizer = wrap_tokenizer(
        Tokenizer.from_file(str(args.out / "demo-target" / "tokenizer.json"))
    )
    target = load_model(args.out / "demo-target", args.device)
    stream = pack(tokenizer, corpus.train)
    held_out = pack(tokenizer, corpus.held_out)
    bos = tokenizer.bos_token_id
    model = build_model(tokenizer, draft=True).to(args.device)
    training_minutes = args.draft_minutes
    if training_minutes > 0:
        began = time.monotonic()
        written = written_text(args, target, stream, bos)
        training_minutes -= (time.monotonic() - began) / 60
        target.compile(dynamic=False)

    def loss_at(fraction: float) -> Tensor:
        length = window_length(fraction)
        if torch.rand(()) < 0.5:
            tokens = draw_windows(stream, TOKENS_PER_BATCH // length, length, bos)
        else:
            tokens = written[
                torch.randint(0, len(written), (TOKENS_PER_BATCH // written.shape[1],))
            ]
        return distillation_loss(model, target, tokens.to(args.device))

    run = Run(training_minutes, args.work / "draft.safetensors", muon_lr=6e-3, adam_lr=4e-3)
    train(model, loss_at, run, lambda: held_out_loss(model, held_out, 8))
    save_model(model, tokenizer, args.out / "demo-draft")


def train_head(args: argparse.Namespace, corpus: Corpus, kind: type[DFlash] | type[Eagle3]) -> None:
    """Distil a draft head from the saved target, as the draft, on text which the target wrote and
    on the corpus.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.out / "demo-target")
    # Measured on two cores: float32 products are 1.7 times as fast as products in bf16.
    target = load_model(args.out / "demo-target", args.device).requires_grad_(False).float()
    stream = pack(tokenizer, corpus.train)
    bos = tokenizer.bos_token_id
    written = written_text(args, target, stream, bos)
    more = draw_windows(stream, len(written) // 4, written.shape[1], bos)
    pool = taught(target, torch.cat((written, more)).to(args.device), DEMO_TAPS)
    held_out = draw_windows(pack(tokenizer, corpus.held_out), 8, written.shape[1], bos)
    unseen = taught(target, held_out.to(args.device), DEMO_TAPS).rows(torch.arange(len(held_out)))
    torch.manual_seed(args.seed)
    model = kind(target, DEMO_TAPS).to(args.device)

    def loss_at(fraction: float) -> Tensor:
        rows = torch.randint(0, len(pool.tokens), (args.head_rows,))
        return model.loss(target, pool.rows(rows.to(args.device)))

    def check() -> float:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return model.loss(target, unseen).item()

    name = "demo-block" if kind is DFlash else "demo-eagle3"
    checkpoint = args.work / f"{name}.safetensors"
    rates = args.rate * 6e-3, args.rate * 2e-3
    run = Run(args.head_minutes, checkpoint, *rates, compiles=False)
    if args.start_head:
        start_from(model, args.start_head)
    train(model, loss_at, run, check)
    save_head(model, target, args.out / name)


@torch.no_grad()
def ranks_of_choice(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Tensor, first: int = 0
) -> Tensor:
    """Return the rank, from 1, that the draft gives the target's most probable next token at each
    position.

    rows   (n, length); positions before `first` are left out
    Returns a flat int64 tensor.
    """
    ranks = []
    for part in rows.to(target.device).split(4):
        choice = logits_of(target, part)[:, first:-1].argmax(-1, keepdim=True)
        scores = logits_of(draft, part)[:, first:-1]
        ranks.append((scores > scores.gather(-1, choice)).sum(-1).flatten().cpu() + 1)
    return torch.cat(ranks)


def evaluate(args: argparse.Namespace, corpus: Corpus) -> None:
    """Print the pair's figures on the held-out modules, three continuations, and one JSON line at
    the end.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.out / "demo-target")
    target, draft = (
        load_model(args.out / name, args.device) for name in ("demo-target", "demo-draft")
    )
    stream = pack(tokenizer, corpus.held_out)
    windows = stream[: len(stream) // 1024 * 1024].view(-1, 1024)
    n_prompts = 64
    n_prompt = 64
    n_new = 128
    starts = torch.linspace(0, len(stream) - n_prompt, n_prompts).long()[:, None]
    prompts = stream[starts + torch.arange(n_prompt)]
    prompts[:, 0] = tokenizer.bos_token_id
    greedy = continue_text(target, prompts, n_new, torch.zeros(n_prompts))
    on_text = ranks_of_choice(target, draft, windows)
    on_greedy = ranks_of_choice(target, draft, greedy, n_prompt - 1)
    for opening in ("def read_lines(path, encoding=", "class Queue:", "import os\nimport sys"):
        ids = tokenizer(opening, return_tensors="pt").input_ids
        print(
            "-" * 40,
            tokenizer.decode(continue_text(target, ids, 120, torch.zeros(1))[0, 1:]),
            sep="\n",
        )
    figures = {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "held_out_tokens": windows.numel(),
        "held_out_nats": {
            "target": round(held_out_loss(target, stream), 3),
            "draft": round(held_out_loss(draft, stream), 3),
        },
        "equal_choice_held_out": round((on_text == 1).float().mean().item(), 3),
        "equal_choice_greedy_text": round((on_greedy == 1).float().mean().item(), 3),
        "rank_of_choice_held_out": [
            round((on_text == k).float().mean().item(), 3) for k in range(1, 9)
        ],
        "rank_of_choice_greedy_text": [
            round((on_greedy == k).float().mean().item(), 3) for k in range(1, 9)
        ],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(figures))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = ("target", "draft", "block", "eagle3", "evaluate")
    parser.add_argument(
        "--stages", nargs="+", choices=stages, default=stages, help="what is not named is kept"
    )
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "train-demo", help="checkpoints"
    )
    parser.add_argument("--target-minutes", type=float, default=55.0, help="0 saves fresh weights")
    parser.add_argument("--draft-minutes", type=float, default=30.0, help="0 saves fresh weights")
    parser.add_argument("--head-minutes", type=float, default=30.0, help="of each draft head")
    parser.add_argument("--start-head", type=Path, help="a checkpoint of the head")
    parser.add_argument("--head-rows", type=int, default=6, help="windows of a batch for heads")
    parser.add_argument(
        "--written-rows",
        type=int,
        default=4096,
        help="rows of 256 tokens the target writes, at most",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=1.0,
        help="on the rates of target and heads; below 1 to go on from a checkpoint",
    )
    parser.add_argument(
        "--start-target", type=Path, help="a checkpoint from which the target's training starts"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train what is asked for, then print the figures."""
    args = parse_args()
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    stages = {
        "target": train_target,
        "draft": train_draft,
        "block": partial(train_head, kind=DFlash),
        "eagle3": partial(train_head, kind=Eagle3),
        "evaluate": evaluate,
    }
    for name in args.stages:
        stages[name](args, corpus)


if __name__ == "__main__":
    main()
