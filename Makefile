# SPDX-License-Identifier: MIT

CC ?= cc
CFLAGS ?= -O3
# the CPU this is built on: SIMD is most of the speed
NATIVE := $(shell for f in -march=native -mcpu=native; do \
    echo 'int x;' | $(CC) $$f -x c -c -o /dev/null - 2>/dev/null && echo $$f && break; done)
WARN = -std=gnu11 -Wall -Wextra
LIBS = -lm -lpthread
ENGINE = llm.c quant.h metal.c kernels.metal
PREFIX ?= /usr/local

ifeq ($(shell uname),Darwin)
METAL = -DLLM_METAL -framework Metal -framework Foundation -framework CoreGraphics -lobjc
endif
# the tests have a GPU in software, on Apple the real one; it takes a compiler that knows half floats
ifeq ($(shell echo '_Float16 x;' | $(CC) -x c -c -o /dev/null - 2>/dev/null && echo yes),yes)
TEST_LIBS = $(or $(METAL),-DLLM_METAL -rdynamic -ldl) $(LIBS)
else
TEST_LIBS = $(LIBS)
endif
# valgrind knows AVX2, but not AVX-512
ifeq ($(shell uname -m),x86_64)
AVX2 = -mavx2 -mfma -mf16c
endif

# you want to use it
all: llm

llm: $(ENGINE)
	$(CC) $(WARN) $(CFLAGS) $(NATIVE) llm.c -o $@ $(LIBS) $(METAL)

# you want to see it work: a story of some 150 words, another one for each SEED
SEED ?= 11
run: llm
	./llm golden/story.gguf "Once upon a time" -n 200 --temp 0.8 --top-k 40 --top-p 0.95 \
	    --repeat-penalty 1.1 --seed $(SEED)

# ---- tests ----

# Each build of the tests meets other code: the CPU's SIMD, plain C, and both under a checker.
test_native: test.c $(ENGINE)
	$(CC) $(WARN) -O3 $(NATIVE) test.c -o $@ $(TEST_LIBS)
test_plain: test.c $(ENGINE)
	$(CC) $(WARN) -O1 -DQUANT_PLAIN test.c -o $@ $(TEST_LIBS)
test_avx2: test.c $(ENGINE)
	$(CC) $(WARN) -g -O1 $(AVX2) test.c -o $@ $(TEST_LIBS)
test_asan: test.c $(ENGINE)
	$(CC) $(WARN) -g -O1 $(NATIVE) -fsanitize=address,undefined -fno-sanitize-recover=all \
	    test.c -o $@ $(TEST_LIBS)

# runs a command and notes in test.log what it said
RUN = run() { echo "== $$1"; shift; { "$$@"; echo "exit status $$?"; } 2>&1 | tee -a test.log; }; run
# adds up the logs: a run without its count, or one that failed without saying which, is a failure
SUM = awk '/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$$/ { p += $$1; f += $$3; s += $$5; said = 1; bad = $$3 } \
    /^exit status/ { if (!said || ($$3 != 0 && !bad)) f++; said = bad = 0 } \
    END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 || p == 0 }' test.log
VALGRIND = valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,indirect

# what runs under the checkers in every test run (`make valgrind` runs all): what is slow there is
# left out; AddressSanitizer talks into metal_models, valgrind does not follow the command line
MEMORY = $(filter-out metal_shapes tokenizer_linear sampler_speed story_perplexity, \
    $(shell sed -n 's/^    {"\([a-z_]*\)", test_.*/\1/p' test.c))

# you changed something: everything that can be checked on this machine (about 4 minutes)
test:
	@rm -f test.log
	@$(MAKE) --no-print-directory -j2 llm test_native test_plain test_avx2 test_asan
	@$(RUN) "optimised build" env LLM="./llm --cpu" ./test_native
	@$(RUN) "plain C" ./test_plain --quick
	@$(RUN) "address and undefined behaviour sanitizers" ./test_asan --quick \
	    $(filter-out metal_models, $(MEMORY))
	@if command -v valgrind > test.tmp; then $(RUN) "valgrind" $(VALGRIND) \
	    ./test_avx2 --quick $(filter-out cli_%, $(MEMORY)); fi
	@$(RUN) "line budgets" $(MAKE) --no-print-directory lines
	@[ -s test.tmp ] || echo "valgrind is not installed: the tests under it were left out"
	@rm -f test.tmp; $(SUM)

# you suspect memory: all tests, also those that are slow there
valgrind: llm test_avx2
	$(VALGRIND) ./test_avx2

# you have no ARM machine: NEON, with and without dot products of bytes, in an emulator
# (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
test-arm:
	for cpu in armv8-a armv8.2-a+dotprod; do \
	    aarch64-linux-gnu-gcc $(WARN) -O1 -march=$$cpu -static test.c -o test_arm $(LIBS) && \
	    LLM="qemu-aarch64 ./test_arm llm --cpu" qemu-aarch64 ./test_arm --quick || exit 1; \
	done

# you changed kernels.metal: races, each of its barriers, bounds and indices broken once, and the
# address spaces, which only a C++ compiler sees (apt-get install clang)
tsan:
	$(CC) $(WARN) -O1 -g -fsanitize=thread test.c -o test_tsan $(TEST_LIBS)
	./test_tsan metal_kernels
# the mutants: one program that holds all of them, made of copies with a switch at each place
mutants: test_native
	@rm -rf test_mutants.d; mkdir test_mutants.d
	@ln -s ../llm.c ../quant.h ../test.c test_mutants.d
	./test_native mutants test_mutants.d
	$(CC) -std=gnu11 -O1 -w $(NATIVE) -fsanitize=bounds -fsanitize-undefined-trap-on-error \
	    -include test_mutants.d/mutants.h test_mutants.d/test.c -o test_mutants $(TEST_LIBS)
	./test_mutants mutants
LINT = { sed -n '/^\#ifdef METAL_LINT/,/^\#endif/p' test.c; \
    cat quant.h; echo '\#undef __METAL_VERSION__'; sed 's/^constant /extern constant /' kernels.metal; } | \
    clang++ --target=aarch64-linux-gnu -DMETAL_LINT -D__METAL_VERSION__=310 -std=c++14 -fsyntax-only -x c++
lint:
	@command -v clang++ > /dev/null || { echo "clang++ is not installed: no lint"; exit 0; }; \
	$(LINT) -Wall -Wextra -Wshadow -Wdouble-promotion -Wno-unknown-attributes -Wno-sign-compare \
	    -Wno-unused -Werror - && \
	$(LINT) -w -Xclang -ast-dump -fno-color-diagnostics - | awk ' \
	    /-(VarDecl|ParmVarDecl|FieldDecl|CStyleCastExpr) / { split($$0, q, "\047"); t = q[2]; \
	        if (t ~ /\*/ && t !~ /address_space|device |DEVICE |threadgroup |volatile /) \
	            { print "a pointer without address space: " $$0; bad = 1 } } \
	    /AddressSpaceConversion/ { print "a cast to another address space: " $$0; bad = 1 } \
	    / static( |$$)/ && /-VarDecl / { print "a static variable: " $$0; bad = 1 } \
	    END { if (!bad) print "kernels.metal and quant.h are clean"; exit bad }'

# you want to know how fast it is here, against this machine's memory and, with LLAMA_BENCH=path of
# a llama-bench, against llama.cpp: medians of three runs, on models of random weights in BENCH_DIR
FORMATS ?= q4_0 q8_0 q4_K q5_K q6_K q2_K q3_K iq4_xs mxfp4 f16
THREADS ?= $(shell nproc 2>&1 || sysctl -n hw.perflevel0.physicalcpu)
BENCH_DIR ?= /tmp
# the speeds of the rows for the prompt and for generation in llama-bench's CSV
PEER = awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$$i] = i; next } \
    { gsub(/^"|"$$/, ""); split($$0, f, "\",\""); s = s " " f[at["avg_ts"]] } END { print "peer" s }'
bench: llm test_plain
	@echo "512 tokens of prompt, 64 of decode, $(THREADS) threads, $$($(CC) --version | head -n 1)"
	@printf "| format | prefill tok/s | decode tok/s | GB/s | of bandwidth | llama.cpp: prefill | decode |"
	@printf " prefill x | decode x |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
	@median() { grep "^$$1" bench.log | cut -d" " -f$$2 | sort -n | sed -n 2p; }; \
	for t in $(FORMATS); do \
	    m=$(BENCH_DIR)/llm-bench.gguf; ./test_plain model $$t $$m || exit 1; rm -f bench.log; \
	    for run in 1 2 3; do \
	        ./llm $$m --cpu -t $(THREADS) --bench 512,64 >> bench.log || exit 1; \
	        [ -z "$$LLAMA_BENCH" ] || "$$LLAMA_BENCH" -m $$m -t $(THREADS) -p 512 -n 64 -r 1 -o csv | \
	            $(PEER) >> bench.log; \
	    done; \
	    echo $$t $$(median prefill 4) $$(median decode 4) $$(median decode 6) $$(median decode 8) \
	        $$(median peer 2) $$(median peer 3) | \
	        awk '{ printf "| %s | %s | %s | %s | %s %% |", $$1, $$2, $$3, $$4, $$5 } \
	            NF < 7 { print " - | - | - | - |" } NF > 6 { printf " %.1f | %.1f | %.2f | %.2f |\n", \
	                $$6, $$7, $$2 / $$6, $$3 / $$7 }'; rm -f $$m bench.log; \
	done

# you wrote much: the budgets of each file, columns, and lines that are packed
define LINES
function budget(name, n, most) {
    printf "%-44s %5d of %d%s\n", name, n, most, (n > most ? "  TOO MANY" : "")
    if (n > most) failed++; else passed++
}
FNR == 1 { section = FILENAME }
/^\/\/ ---- ([0-9]+\.|the grids|appendix)/ { section = FILENAME " " $$4 }
/^\/\/ ==== / { section = FILENAME " " $$3 " " $$4 }
{ lines[FILENAME]++; part[section]++; if (length($$0) > 100) wide++ }
FILENAME == "quant.h" && /^#ifndef QUANT_H/ { manual = FNR }
{   # a line of code holds one statement; the head of a for loop holds three
    sub(/\/\/.*/, ""); gsub(/"([^"\\]|\\.)*"|';'/, "")
    while (match($$0, /for \([^;]*;[^;]*;/)) $$0 = substr($$0, 1, RSTART - 1) substr($$0, RSTART + RLENGTH)
    n = gsub(/;/, "")
    if (n) { semicolons[FILENAME] += n; ends[FILENAME]++ }
}
END {
    unicode = part["llm.c Unicode"]; grids = part["quant.h grids"]
    budget("llm.c", lines["llm.c"] - unicode, 4382); budget("  its Unicode tables", unicode, 250)
    budget("quant.h", lines["quant.h"] - grids, 1120); budget("  its grids", grids, 340)
    budget("metal.c", lines["metal.c"], 600); budget("kernels.metal", lines["kernels.metal"], 1000)
    budget("test.c", lines["test.c"], 4061); budget("  the GPU in software", part["test.c a GPU"], 800)
    budget("first sitting", manual + part["quant.h first sitting:"] + \
        part["llm.c GGUF"] + part["llm.c model"] + part["llm.c ops"] + part["llm.c forward"], 1000)
    budget("lines over 100 columns", wide, 0)
    for (file in lines) budget("semicolons on 100 lines of " file, 100 * semicolons[file] / ends[file], 130)
    printf "%d passed, %d failed, 0 skipped\n", passed, failed
    exit failed > 0
}
endef
export LINES
lines:
	@awk "$$LINES" llm.c quant.h metal.c kernels.metal test.c

clean:
	rm -f llm test_native test_plain test_avx2 test_asan test_arm test_tsan test_mutants *.log test.tmp
	rm -rf test_mutants.d

install: llm
	install -d $(DESTDIR)$(PREFIX)/bin
	install llm $(DESTDIR)$(PREFIX)/bin/llm

.PHONY: all run test valgrind test-arm tsan mutants lint bench lines clean install
