# Thin front of `cargo xtask`.
.PHONY: demo test assets tools
demo: tools
	@cargo xtask demo
test: tools
	@cargo xtask test
assets: tools
	@cargo xtask assets
# What nothing can be built without, in words of our own.
tools:
	@command -v cc > /dev/null || { echo "A linker is missing: install the package gcc" >&2; exit 1; }
	@command -v cargo > /dev/null || \
		{ echo "Rust is missing: install 1.95 or later from https://rustup.rs" >&2; exit 1; }
