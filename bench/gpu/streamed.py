"""Llama2-70B's shape in 24 GiB of a card: a pass against the link, by tree size; and seconds per token, plain and by trees."""

from dataclasses import asdict, dataclass
from statistics import median

from transformers import AutoTokenizer

from bench._prompts import held_out_prompts
from bench.gpu._shapes import DRAFT, TARGET, opened, random_tree, written
from offload_rt import LLM, SamplingParams
from offload_rt.measure import upload_gbps

EXPECTED_S = 240


@dataclass(frozen=True)
class Shapes:
    """What is measured; a test makes it small."""

    target: str = "llama-2-70b"
    n_layers: int = 80
    draft: str = "llama-2-7b"
    n_draft_layers: int = 32
    device_memory: str = "24GiB"
    n_nodes: tuple[int, ...] = (1, 64, 256, 512, 768, 1024, 2048)
    n_prompts: int = 2
    n_new: int = 96


def measure(shapes: Shapes = Shapes()) -> dict[str, object]:
    """Pass times at every size with the floor beside them, then generation."""
    target, draft = written(TARGET, shapes.target), written(DRAFT, shapes.draft)
    room = {"device": "cuda", "dtype": "bfloat16", "device_memory": shapes.device_memory, "max_model_len": 512}
    with opened(target, shapes.n_layers, drafter="ngram", tree_size=max(shapes.n_nodes), **room) as llm:
        result = {"plan": _plan(llm), "passes": _passes(llm, shapes.n_nodes)}
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), shapes.n_prompts + 1)
    with opened(target, shapes.n_layers, (draft, shapes.n_draft_layers), **room) as llm:
        return result | {
            "generation": [_generation(llm, prompts, temperature, shapes.n_new) for temperature in (0.0, 0.6)]
        }


def _plan(llm: LLM) -> dict[str, object]:
    plan = llm.plan
    return {
        "resident_layers": plan.count("device"), "streamed_layers": plan.count("host"), "n_slots": plan.n_slots,
        "streamed_bytes": plan.on("host"), "notice": llm.engine.notice,
    }  # fmt: skip


def _passes(llm: LLM, sizes: tuple[int, ...]) -> list[dict[str, object]]:
    """Interleaved with the rate of the link, so that each pass has its own floor."""
    streamed = sum(nbytes for _, nbytes in llm.plan.pass_bytes.streamed)
    rows = []
    for n in sizes:
        gbps = upload_gbps(llm.engine.runner.device)
        times = llm.time_passes(random_tree(n), 128, 3)
        rows.append({"rows": n, "seconds": times, "floor_s": streamed / gbps / 1e9, "link_gbps": gbps})
    return rows


def _generation(llm: LLM, prompts: list[list[int]], temperature: float, n_new: int) -> dict[str, object]:
    runs, plain = [], []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
        stats = llm.generate(prompt, params)[0].stats
        if i > 0:  # by the first the pair becomes known
            runs.append(asdict(stats))
            plain += llm.time_plain(len(prompt), 2)
    per_token = median(run["measured_seconds_per_token"] for run in runs)
    return {
        "temperature": temperature,
        "plain_s": median(plain),
        "times_faster": median(plain) / per_token,
        "runs": runs,
    }
