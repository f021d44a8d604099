# Thin front of `cargo xtask`.
.PHONY: demo test assets
demo:
	@cargo xtask demo
test:
	@cargo xtask test
assets:
	@cargo xtask assets
