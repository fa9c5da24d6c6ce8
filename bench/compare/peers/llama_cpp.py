"""llama.cpp on the job's GGUF file, one pass over the weights for each token."""

from bench.compare.peers import _llama_cpp as llama_cpp

TITLE = "llama.cpp"
PACKAGES = llama_cpp.PACKAGES
DRAFTS = False
unfit = llama_cpp.unfit
load = llama_cpp.load
