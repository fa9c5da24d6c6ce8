"""Everything that needs a card, one file for each section; `python -m bench.gpu` runs them."""
