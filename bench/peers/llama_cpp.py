"""llama.cpp on the job's GGUF file, one pass over the weights for each token."""

from bench.compare import llama_cpp

TITLE, PACKAGES, DRAFTS = "llama.cpp", llama_cpp.PACKAGES, False
unfit, load = llama_cpp.unfit, llama_cpp.load
