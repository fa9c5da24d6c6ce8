"""Configs for tests of planning."""

MIXTURE = {
    "model_type": "mixtral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
# A format without a product of few rows by its codes.
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
