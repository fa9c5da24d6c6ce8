"""The CPU kernels for aarch64 under qemu, by tests of the CPU kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from executor.test_bit_identical import (
    test_one_call_for_layers_equals_single_operations as one_call,
)
from ops.test_attention_cpu import (  # noqa: F401
    test_attention_equals_float64,
    test_most_probable_token_reveals_nan_and_infinity,
    test_most_probable_tokens_equal_those_of_torch,
    test_most_probable_tokens_have_no_denormal_probability,
    test_norms_and_gates_do_not_depend_on_the_batch,
    test_rotary_embedding_equals_the_reference_bit_for_bit,
    test_tree_attention_equals_plain_decoding_bit_for_bit,
)
from ops.test_linear_cpu import (  # noqa: F401
    LARGE,
    assert_weights_are_exact,
    test_a_row_of_a_large_matrix_has_the_same_bits_in_any_company,
    test_dense_products_equal_float64_products,
    test_groups_equal_separate_products_bit_for_bit,
    test_products_of_codes_equal_products_of_their_values,
    test_unpacked_weights_equal_the_reference_bit_for_bit,
)
from support import neon
from support.tiny import Zoo

from offload_rt.ops import cpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(neon.missing() != "", reason=neon.missing())]


@pytest.fixture(scope="module")
def library() -> Iterator[neon.NeonLibrary]:
    library = neon.NeonLibrary()
    yield library
    library.stop()


@pytest.fixture(autouse=True)
def level(library: neon.NeonLibrary, monkeypatch: pytest.MonkeyPatch) -> int:
    """Select the library for aarch64, which has a single level."""
    monkeypatch.setattr(cpu, "library", lambda: library)
    return 0


@pytest.mark.parametrize("name", LARGE)
def test_products_with_unit_vectors_equal_the_reference(name: str) -> None:
    assert_weights_are_exact(name, 136, 256, torch.float16)


@pytest.mark.parametrize("name", ["llama", "llama Q4_0"])
def test_one_call_for_layers_equals_single_operations(
    zoo: Zoo, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_call(zoo, name, "bfloat16", "resident", tmp_path, monkeypatch)
