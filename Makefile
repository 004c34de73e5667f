# peerlane: `make demo` shows what it does, `make test` tests all of it; both install what is missing first.
# `make help` lists the rest.

CARGO ?= cargo
MPICC ?= mpicc
# Where `make install` puts things; DESTDIR goes before it, for packagers.
PREFIX ?= /usr/local
DESTDIR ?=
# release; dev for a quicker build; test for what `cargo test` has built.
PROFILE ?= release

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# Programs are linked against this name; another major version is another library.
SONAME := libpeerlane.so.$(firstword $(subst ., ,$(VERSION)))
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
BUILT := $(TARGET)/$(if $(filter dev test,$(PROFILE)),debug,$(PROFILE))
FATBIN := $(TARGET)/kernels.fatbin
VERIFY_FATBIN := $(TARGET)/verify.fatbin
# All there is: GPU ranks run against a stand-in driver.
TESTED := peerlane/cli,peerlane/cuda,peerlane-c/cuda,peerlane-nccl/cuda,peerlane-verify/cuda
RIVAL := $(TARGET)/rivals/peerlane-rival-mpi
# What `scripts/bench-gpu` needs on a machine with a GPU, and nothing else; the same for `bench-verify` and `bench-multi`.
GPU_BENCH := $(TARGET)/gpu
VERIFY_BENCH := $(TARGET)/gpu-verify
MULTI_BENCH := $(TARGET)/gpu-multi
C_SOURCES := $(wildcard cuda/*.h cuda/*.cuh cuda/*.cu cuda/*.cpp include/*.h examples/c/*.c tests/c/*.[ch] \
  tests/explorer/*.h tests/explorer/*.cuh tests/explorer/*.cpp tests/sanitizers/*.h tests/sanitizers/*.cpp tests/fakecuda/*.[ch] tests/fakenccl/*.c \
  benches/rivals/*.c examples/verify/cuda/*)

.DEFAULT_GOAL := build
# A recipe builds or measures with all cores; two at once would disturb each other.
.NOTPARALLEL:
.PHONY: build rival demo test test-torch bench bench-gpu bench-gpu-build bench-verify bench-verify-build bench-multi bench-multi-build \
  soak install uninstall bindings format clean help setup check-format check-lint check-docs check-kernels check-rust

# With ranks on GPUs where their kernels can be compiled: scripts/gpu-build says which way.
build: ## Build libraries, tool and, where mpicc is, the Open MPI driver
	@settings=$$(scripts/gpu-build settings $(FATBIN)) && eval "$$settings" && set -x && \
	  $(CARGO) build --workspace --features $$FEATURES --profile $(PROFILE)
	@# Programs linked against the build folder look for the library by its soname.
	@ln -sf libpeerlane.so $(BUILT)/$(SONAME)
	@if command -v $(MPICC) >/dev/null; then $(MAKE) --no-print-directory rival; \
	else echo "no $(MPICC): without 'peerlane bench --rival mpi' (openmpi-bin and libopenmpi-dev bring it)"; fi

rival: $(RIVAL)

$(RIVAL): benches/rivals/mpi.c
	@mkdir -p $(@D)
	$(MPICC) -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -Wall -Wextra -Werror -o $@ $<

demo: ## Measure and check an all-reduce over 4 processes, then show what else there is
	@scripts/setup build
	@$(MAKE) --no-print-directory build
	@scripts/demo $(BUILT) $(RIVAL)

# The tests of Rust come last: their summary is the last thing to read.
test: ## Run every check and every test
	@scripts/setup test
	@$(MAKE) --no-print-directory check-format check-kernels rival
	@# One fatbin serves every build below: nvcc takes minutes.
	@PEERLANE_FATBIN=$(FATBIN) PEERLANE_VERIFY_FATBIN=$(VERIFY_FATBIN) $(MAKE) --no-print-directory check-lint check-docs check-rust

check-format: ## Rust and C as rustfmt and clang-format leave it
	$(CARGO) fmt --all --check
	.venv/bin/clang-format --dry-run --Werror $(C_SOURCES)

check-lint: ## clippy, warnings are errors
	$(CARGO) clippy --workspace --all-targets --features $(TESTED) -- -D warnings

check-docs: ## rustdoc, warnings are errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --features $(TESTED) --no-deps --document-private-items

check-kernels: ## Compile the kernels for every GPU and assert on the outcome
	@mkdir -p $(TARGET)
	scripts/check-kernels --output $(FATBIN) --verify-output $(VERIFY_FATBIN)

check-rust: ## cargo test, C clients included
	$(CARGO) test --workspace --features $(TESTED)

test-torch: build ## Load the real PyTorch (several GB of wheels) over the NCCL replacement, without a GPU
	scripts/test-torch $(BUILT) $(TARGET)/torch

bench: build ## Host-side benchmarks, then all-reduce against Open MPI; results in target/bench
	@mkdir -p $(TARGET)/bench
	$(CARGO) bench --bench host
	scripts/bench $(BUILT) $(RIVAL) $(TARGET)/bench

bench-gpu: bench-gpu-build ## On a machine with a GPU: check and measure every schedule on it, beside NCCL where it is
	$(GPU_BENCH)/bench-gpu

bench-gpu-build: ## Put what bench-gpu needs into target/gpu, to be run on another machine without Rust
	@scripts/setup gpu
	@settings=$$(scripts/gpu-build settings $(FATBIN)) && eval "$$settings" && set -x && \
	  $(CARGO) build --features cli,cuda --profile $(PROFILE) --bin peerlane --example gpu_smoke
	@mkdir -p $(GPU_BENCH)
	install -m 755 $(BUILT)/peerlane $(BUILT)/examples/gpu_smoke scripts/bench-gpu $(GPU_BENCH)

bench-verify: bench-verify-build ## On a machine with a GPU: check and measure the verify runner on it, beside NCCL where that runs
	@mkdir -p $(TARGET)/bench
	$(VERIFY_BENCH)/bench-verify --out $(TARGET)/bench

bench-verify-build: ## Put what bench-verify needs into target/gpu-verify, to be run on another machine without Rust
	@scripts/setup gpu
	@settings=$$(scripts/gpu-build settings $(FATBIN)) && eval "$$settings" && set -x && \
	  $(CARGO) build -p peerlane-verify --features peerlane-verify/cuda --profile $(PROFILE)
	@mkdir -p $(VERIFY_BENCH)/golden/dsv3_tiny
	install -m 755 $(BUILT)/peerlane-verify scripts/bench-verify $(VERIFY_BENCH)
	install -m 644 examples/verify/golden/dsv3_tiny/* $(VERIFY_BENCH)/golden/dsv3_tiny

bench-multi: bench-multi-build ## On a machine with several GPUs: check and measure everything with a rank on each, beside NCCL over the same links
	@mkdir -p $(TARGET)/bench
	$(MULTI_BENCH)/bench-multi --out $(TARGET)/bench

bench-multi-build: ## Put what bench-multi needs into target/gpu-multi, to be run on another machine without Rust
	@scripts/setup gpu
	@settings=$$(scripts/gpu-build settings $(FATBIN)) && eval "$$settings" && set -x && \
	  $(CARGO) build --workspace --features $$FEATURES --profile $(PROFILE) --bins --lib --example gpu_smoke
	@mkdir -p $(MULTI_BENCH)
	install -m 755 $(BUILT)/peerlane $(BUILT)/peerlane-verify $(BUILT)/examples/gpu_smoke scripts/bench-multi scripts/nccl-gpu scripts/torch-check \
	  scripts/pynccl-check scripts/rank_processes.py $(BUILT)/libpeerlane_preload.so $(BUILT)/libpeerlane_nccl.so $(BUILT)/libpeerlane_libnccl.so $(MULTI_BENCH)

soak: build ## Random calls, checked, leaks watched, for MINUTES (default 10); SEED=N repeats a run
	$(BUILT)/peerlane soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

install: ## Install library, header, pkg-config file and tool under PREFIX
	@# Under sudo there is often no cargo: then what `make` has built is installed.
	@if command -v $(CARGO) >/dev/null; then $(MAKE) --no-print-directory build; fi
	@test -f $(BUILT)/libpeerlane.so -a -f $(BUILT)/peerlane || \
	  { echo "nothing built in $(BUILT) and no cargo here: run 'make' first" >&2; exit 1; }
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 755 $(BUILT)/libpeerlane.so $(DESTDIR)$(PREFIX)/lib/libpeerlane.so.$(VERSION)
	ln -sf libpeerlane.so.$(VERSION) $(DESTDIR)$(PREFIX)/lib/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(PREFIX)/lib/libpeerlane.so
	install -m 644 include/peerlane.h include/peerlane_nccl.h $(DESTDIR)$(PREFIX)/include
	install -m 755 $(BUILT)/libpeerlane_preload.so $(BUILT)/libpeerlane_nccl.so $(DESTDIR)$(PREFIX)/lib
	@# In a folder of its own: on the loader's path every program would find it in NVIDIA's place.
	install -D -m 755 $(BUILT)/libpeerlane_libnccl.so $(DESTDIR)$(PREFIX)/lib/peerlane/libnccl.so.2
	sed 's|@prefix@|$(PREFIX)|; s|@version@|$(VERSION)|' ffi/c/peerlane.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/peerlane.pc
	chmod 644 $(DESTDIR)$(PREFIX)/lib/pkgconfig/peerlane.pc
	install -m 755 $(BUILT)/peerlane $(DESTDIR)$(PREFIX)/bin/peerlane
	@if [ -f $(RIVAL) ]; then install -D -m 755 $(RIVAL) $(DESTDIR)$(PREFIX)/libexec/peerlane/peerlane-rival-mpi; fi
	@if [ -z "$(DESTDIR)" ]; then echo "installed; if $(PREFIX)/lib is in the loader's path, run ldconfig"; fi

uninstall: ## Remove what install put there
	rm -f $(DESTDIR)$(PREFIX)/lib/libpeerlane.so $(DESTDIR)$(PREFIX)/lib/$(SONAME)
	rm -f $(DESTDIR)$(PREFIX)/lib/libpeerlane.so.$(VERSION) $(DESTDIR)$(PREFIX)/lib/pkgconfig/peerlane.pc
	rm -f $(DESTDIR)$(PREFIX)/lib/libpeerlane_preload.so $(DESTDIR)$(PREFIX)/lib/libpeerlane_nccl.so
	rm -rf $(DESTDIR)$(PREFIX)/lib/peerlane
	rm -f $(DESTDIR)$(PREFIX)/include/peerlane.h $(DESTDIR)$(PREFIX)/include/peerlane_nccl.h $(DESTDIR)$(PREFIX)/bin/peerlane
	rm -rf $(DESTDIR)$(PREFIX)/libexec/peerlane

bindings: ## Write src/launch.rs anew from cuda/launch.h, and NCCL's types from the headers of its pinned wheel
	@scripts/setup test
	$(CARGO) test --test bindings -- --ignored --exact write
	@rm -rf $(TARGET)/nccl && mkdir -p $(TARGET)/nccl
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TARGET)/nccl -r ffi/nccl/bindings/requirements.txt
	$(CARGO) test -p peerlane-nccl --test bindings -- --ignored --exact write

format: ## Format Rust and C
	@scripts/setup test
	$(CARGO) fmt --all
	.venv/bin/clang-format -i $(C_SOURCES)

clean: ## Remove what was built; .venv stays
	$(CARGO) clean

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-14s %s\n' "$$name" "$$text"; done
