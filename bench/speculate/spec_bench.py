"""Tokens per pass and speed on Spec-Bench, by category, against plain decoding in the same run.

    python -m bench.speculate.spec_bench QUESTIONS MODEL [--draft-model HEAD]

QUESTIONS has a JSON object per line with `category` and `turns` (github.com/hemingkx/Spec-Bench).
First turns only, through the chat template. Drafters answer each question in turn; after each
question, passes of plain decoding at the middle of its first answer are timed.
"""

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.common.measure import commit
from offload_rt import LLM, SamplingParams

# All other categories belong to MT-Bench.
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
_N_PLAIN = 7


def questions_of(path: Path, per_category: int, skip: int) -> dict[str, list[str]]:
    """Return the first turns of evenly spaced questions by category.

    skip  questions of each category before the first
    """
    turns = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        category = question["category"]
        turns[category if category in CATEGORIES else "mt_bench"].append(question["turns"][0])
    return {
        category: texts[skip :: max((len(texts) - skip) // per_category, 1)][:per_category]
        for category, texts in turns.items()
    }


@dataclass
class Sums:
    """Tokens, passes and seconds of decoding, and the seconds that plain decoding would need.

    ratios  times plain decoding of each question
    """

    tokens: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0
    plain_s: float = 0.0
    ratios: tuple[float, ...] = ()

    def add(self, other: "Sums") -> None:
        """Add the sums of further questions."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self) -> dict[str, float]:
        """Return tokens per pass, tokens per second, and the ratio to plain decoding: of all
        questions, and of the slowest.
        """
        return {
            "tokens_per_pass": self.tokens / self.passes,
            "tokens_per_second": self.tokens / self.seconds,
            "times_plain": self.plain_s / self.seconds,
            "least_times_plain": min(self.ratios),
        }


def ask(llm: LLM, text: str, params: SamplingParams, plain_s: float | None) -> tuple[Sums, float]:
    """Answer a question; return its sums, and the seconds of a plain pass at its length."""
    output = llm.chat([{"role": "user", "content": text}], params)[0]
    stats = output.stats
    if plain_s is None:
        context = len(output.prompt_token_ids) + len(output.token_ids) // 2
        plain_s = median(llm.time_plain(context, _N_PLAIN))
    n = len(output.token_ids) - 1
    seconds = n * (stats.measured_seconds_per_token or 0.0)
    n_passes = n / (stats.measured_tokens_per_pass or 1.0)
    return Sums(n, n_passes, seconds, n * plain_s, (n * plain_s / seconds,)), plain_s


def main() -> None:
    """Run the benchmark; print a line per category and drafter, and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("model")
    parser.add_argument("--draft-model", help="a draft model or head, beside the drafters without")
    parser.add_argument("--draft-predictions", help="a file, also for drafters without a model")
    parser.add_argument("--drafters", nargs="*", default=["recycle"])
    parser.add_argument("--device-memory")
    parser.add_argument("--rows", type=int, help="fixed rows of a tree; default: automatic")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--skip", type=int, default=0, help="first question of each category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of prompt and answer")
    flags = parser.parse_args()
    params = SamplingParams(max_tokens=flags.tokens, temperature=flags.temperature, seed=0)
    given = {"device_memory": flags.device_memory, "max_model_len": flags.max_len}
    given |= {"tree_size": flags.rows, "draft_predictions": flags.draft_predictions}
    choices = {name: {"drafter": name} for name in flags.drafters}
    if flags.draft_model:
        choices["draft model"] = {"draft_model": flags.draft_model}
    result: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    totals = {name: Sums() for name in choices}
    with ExitStack() as closes:
        llms = {
            name: closes.enter_context(LLM(flags.model, **choice, **given))
            for name, choice in choices.items()
        }
        questions = questions_of(flags.questions, flags.per_category, flags.skip)
        for category, texts in questions.items():
            sums = {name: Sums() for name in llms}
            for text in texts:
                plain_s = None
                for name, llm in llms.items():
                    answer, plain_s = ask(llm, text, params, plain_s)
                    sums[name].add(answer)
            for name, part in sums.items():
                totals[name].add(part)
                result[name][category] = part.figures()
                print(category, name, _line(part), flush=True)
    for name, total in totals.items():
        result[name]["all"] = total.figures()
        print("all", name, _line(total), flush=True)
    print(json.dumps({"commit": commit(), **vars(flags), "result": result}, default=str))


def _line(sums: Sums) -> str:
    figures = sums.figures()
    return (
        f"{figures['tokens_per_pass']:.2f} tokens per pass,"
        f" {figures['tokens_per_second']:.2f} tokens/s, {figures['times_plain']:.2f} times plain"
        f" (least {figures['least_times_plain']:.2f})"
    )


if __name__ == "__main__":
    main()
