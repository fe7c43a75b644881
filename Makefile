# SPDX-License-Identifier: MIT

CC ?= cc
CFLAGS ?= -O3
# the CPU that CC or CFLAGS name, or this one, AVX-512 whole: SIMD is most of the speed
NATIVE ?= $(or $(filter -march=% -mcpu=%,$(CC) $(CFLAGS)), $(shell \
    for f in "-march=native -mprefer-vector-width=512" -march=native -mcpu=native; do \
    echo 'int x;' | $(CC) $$f -x c -c -o /dev/null - 2>/dev/null && echo $$f && break; done))
# -fno-trapping-math changes no result and lets loops that clamp become vector code; a hot loop that
# does not begin with a cache line can be 5 % slower
WARN = -std=gnu11 -Wall -Wextra -fno-trapping-math -falign-loops=64
LIBS = -lm -lpthread
ENGINE = llm.c quant.h metal.c kernels.metal
PREFIX ?= /usr/local

METAL := $(if $(filter Darwin,$(shell uname)),-DLLM_METAL -framework Metal -framework Foundation \
    -framework CoreGraphics -lobjc)
GPU = $(or $(METAL),$(if $(filter Linux,$(shell uname)),-DLLM_CUDA -ldl))
# the tests use a GPU in software, on Apple the real one: the compiler must know half floats and,
# for the one in software, [[attributes]] in C
PROBE = _Float16 x; $(if $(METAL),,void f(int y [[x]]);)
KNOWN := $(shell echo '$(PROBE)' | $(CC) -std=gnu11 -x c -c -o /dev/null - 2>/dev/null && echo yes)
LINK = test.c $(if $(KNOWN),$(or $(METAL),-DLLM_METAL -rdynamic -ldl)) $(LIBS)
SANITIZE = -fno-sanitize-recover=all -fsanitize=address,undefined
AVX2 := $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mfma -mf16c)

# you want to use it
all: llm
llm: FLAGS = -Wshadow $(NATIVE) $(CFLAGS)
llm: LINK = llm.c $(LIBS) $(GPU)
llm: $(ENGINE) llm.flags
	$(BUILD)
# Another command builds anew. But if no flags are given, `make install` takes what is there.
BUILD = $(CC) $(WARN) $(CPPFLAGS) $(FLAGS) $(LDFLAGS) -o $(@:.flags=) $(LINK)
GIVEN = $(foreach v,CC NATIVE CPPFLAGS CFLAGS LDFLAGS GPU,$(filter env% command,$(origin $v)))
%.flags: always
	@$(if $(GIVEN),,$(if $(filter install,$(MAKECMDGOALS)),test -e $@ ||)) { \
	    new='$(subst ','\'',$(BUILD))'; echo "$$new" | cmp -s - $@ || echo "$$new" > $@; }

# you want to see it work: a story of some 150 words, another one for each SEED
SEED ?= 11
run: llm
	./llm golden/story.gguf "Once upon a time" -n 200 --temp 0.8 --top-k 40 --top-p 0.95 \
	    --repeat-penalty 1.1 --seed $(SEED)

# Each build of the tests covers other code: this CPU's SIMD, any CPU's, Part I's plain engine, then
# with it quant.h's four codes in a word, tiles and a ring as on NVIDIA's GPUs, SIMD under checkers
# (-g1: they name lines), and metal.c's half for NVIDIA. valgrind knows no AVX-512, and takes long
# for multiply-adds: there are none. Without Part V's loops or inlined decoders a build takes less.
test_native: FLAGS = $(NATIVE) $(CFLAGS)
test_plain: FLAGS = -O1
test_words: FLAGS = -O1 -DLLM_PLAIN -DQUANT_WORDS $(if $(METAL),,-DLARGE_TILES)
test_book: FLAGS = -O2 -DLLM_PLAIN
test_avx2: FLAGS = -g1 -O2 -ffp-contract=off $(AVX2)
test_asan: FLAGS = -g1 -O1 $(NATIVE) $(SANITIZE) -Dalways_inline=noinline -Wno-attributes
test_tsan: FLAGS = -g -O1 -fsanitize=thread
test_cuda: FLAGS = $(NATIVE) $(CFLAGS) -DLLM_CUDA
test_driver: FLAGS = -g1 -O1 -DLLM_PLAIN -DLLM_CUDA -DSOFT_DRIVER -rdynamic -fsanitize=address
test_plain test_book test_cuda test_driver: LINK = test.c $(LIBS) -ldl
BUILDS = $(addprefix test_,native plain words book avx2 asan tsan cuda driver)
$(BUILDS): %: test.c $(ENGINE) %.flags
	start=$$(date +%s); $(BUILD) && echo "$@: compiled in $$(($$(date +%s) - start)) s"

# what the checkers run each time (`make valgrind`: all, slowly): AddressSanitizer talks into
# metal_models, valgrind does not follow the command line. Kernels run where words are as on GPUs
ALL = $(shell sed -n '/^static const Test TESTS/,/^}/{s/T(\([a-z_]*\))/\1/g; /^    /p;}' test.c)
MEMORY = $(filter-out metal_models metal_shapes tokenizer_linear unicode_tables, $(ALL))
CHECKER = valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,indirect
test_native.log: llm
test_native.log: RUN = env LLM="./llm --cpu" ./test_native $(filter-out metal_k% metal_s%, $(ALL))
test_plain.log: RUN = ./test_plain --quick $(filter-out metal_% cli_% guesses, $(ALL)) cli_numbers
test_words.log: RUN = ./test_words --quick formats formats_grids $(filter metal_%, $(ALL))
test_book.log: RUN = ./test_book --quick $(filter-out metal_% cli_%, $(ALL)) cli_completion
test_asan.log: RUN = ./test_asan --quick $(filter-out metal_k% cli_numbers, $(MEMORY)) && \
    ./test_asan --quick --quick metal_kernels
test_driver.log: RUN = ./test_driver --quick --quick metal_models metal_failures
test_avx2.log: RUN = $(CHECKER) ./test_avx2 --quick --quick $(filter-out cli_% metal_k%, $(MEMORY))
test_%.log: test_%
	@echo "$< ..."; start=$$(date +%s); \
	{ echo "== $<"; $(RUN); echo "exit status $$?"; } > $@ 2>&1; \
	echo "$<:" $$(tail -n 2 $@), $$(($$(date +%s) - start)) s
# adds up the logs, and names what failed: also a run without its count, or one that failed silently
SUM = awk '/^== / { name = substr($$0, 4) } \
    /^[0-9]+ passed, .* skipped$$/ { p += $$1; f += bad = $$3; s += $$5; said = 1 } \
    /^exit status/ { if (!said || ($$3 != 0 && !bad)) f += bad = 1; \
        if (bad) print "FAILED: " name; said = bad = 0 } \
    END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 || p == 0 }' test.log

# you changed something: all that can be checked on this machine, in some 5 minutes, two builds or
# runs at a time, the longest first; each says when it begins and how it ends, the logs come last
CHECKS = native $(if $(shell command -v valgrind 2>&1),avx2) asan words plain book \
    $(if $(METAL),,$(if $(KNOWN),driver))
test:
	@rm -f test.log $(CHECKS:%=test_%.log)
	@$(MAKE) --no-print-directory -j2 $(CHECKS:%=test_%.log)
	@cat $(CHECKS:%=test_%.log) > test.log; cat test.log
	@$(if $(filter avx2,$(CHECKS)),,echo "valgrind is not installed: its tests were left out";) $(SUM)

# you have an NVIDIA GPU: the kernels on it (NAME=metal_kernels: that test alone), and how fast they
# are (NAME=q4_0: the rows with that in their names). `./llm MODEL -c 16384 --bench 512,64` had on
# an H200 (medians of three; in brackets divided by what llama.cpp de3ff81 had with -fa 1):
#                        512 in        2,048 in      8,192 in      64 out after 512
#   Llama-8B q4_K        11689 (1.17)  14220 (1.45)  12453 (1.27)   487
#   Qwen3-0.6B q4_0      60980 (1.29)  96220 (2.1)   64012 (1.44)  1561; q8_0 1495
#   experts; hybrid      46216 (1.35); 37600 (1.43)                 969; 1225
#   state space; latent  64800 (1.07); 37451 (1.22)                1966;  718
test-cuda: test_cuda
	@./test_cuda $(or $(NAME),metal_kernels metal_models metal_shapes metal_failures)
bench-cuda: test_cuda
	@./test_cuda --bench "$(NAME)"

# you suspect memory: all tests, also those that are slow there
valgrind: llm test_avx2
	$(CHECKER) ./test_avx2

# you have no ARM machine: NEON, with and without dot products of bytes, and 32 bits, in an emulator
# (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-arm-linux-gnueabihf qemu-user)
test-arm:
	for cc in "aarch64-linux-gnu-gcc -march=armv8-a" arm-linux-gnueabihf-gcc \
	    "aarch64-linux-gnu-gcc -march=armv8.2-a+dotprod"; do \
	    $$cc $(WARN) -O1 -static test.c -o test_arm $(LIBS) && qemu="qemu-$${cc%%-*} -cpu max" && \
	    LLM="$$qemu ./test_arm llm --cpu" $$qemu ./test_arm --quick || exit 1; \
	done

# you changed kernels.metal: races in it
tsan: test_tsan
	./test_tsan metal_kernels

# you changed kernels.metal or quant.h: what only C++ sees in them (apt-get install clang)
LINT = { sed -n '/^\#ifdef METAL_LINT/,/^\#endif/p' test.c; cat quant.h; \
    echo '\#undef __METAL_VERSION__'; sed 's/^constant /extern constant /' kernels.metal; } | \
    clang++ --target=aarch64-linux-gnu -DMETAL_LINT -D__METAL_VERSION__=310 -std=c++14 -x c++
lint:
	@$(LINT) -Wall -Wextra -Wshadow -Wdouble-promotion -Wno-unknown-attributes -Wno-sign-compare \
	    -Wno-unused -Wno-unused-parameter -Werror -fsyntax-only - && \
	$(LINT) -w -fsyntax-only -Xclang -ast-dump -fno-color-diagnostics - | awk ' \
	    /-(VarDecl|ParmVarDecl|FieldDecl|CStyleCastExpr) / { split($$0, q, "\047"); t = q[2]; \
	        if (t ~ /\*/ && t !~ /address_space|device |DEVICE |threadgroup |volatile /) \
	            { print "a pointer without address space: " $$0; bad = 1 } } \
	    /AddressSpaceConversion|-VarDecl .* static( |$$)/ { print "not Metal: " $$0; bad = 1 } \
	    END { if (!bad) print "kernels.metal and quant.h are clean"; exit bad }'

# you changed what reads files or text: RUNS hostile inputs for each of FUZZ (apt-get install clang)
FUZZ ?= loader vocabulary tokenize detokenize template
# Without inlined decoders and observed inner loops this compiles soon; NULL + 0 ends empty lists.
UNSEEN = src:*quant.h fun:transpose fun:float_* fun:*matvec* fun:tile_* fun:int8_* fun:query_* \
    fun:norm fun:read_item fun:read_choice fun:item_length
FUZZER = clang $(WARN) -g -O1 $(AVX2) $(SANITIZE),fuzzer -fno-sanitize=pointer-overflow -DLLM_FUZZ \
    -Dalways_inline=noinline -fsanitize-coverage-ignorelist=test_fuzz.d/unseen
fuzz:
	@mkdir -p $(FUZZ:%=test_fuzz.d/%); printf '%s\n' $(UNSEEN:%='%') > test_fuzz.d/unseen
	@$(FUZZER) test.c -o test_fuzz $(LIBS)
	@for t in $(FUZZ); do most=200; n=2000000; case $$t in \
	    loader) most=6000; n=10000000;; vocabulary) most=3000;; template) most=1000; esac; \
	    ASAN_OPTIONS=quarantine_size_mb=4:detect_leaks=0 ./test_fuzz -runs=$(or $(RUNS),$$n) \
	        -max_len=$$most -mutate_depth=2 -timeout=60 -artifact_prefix=test_fuzz.d/$$t- \
	        test_fuzz.d/$$t 2> test_fuzz.d/$$t.log || { tail -n 40 test_fuzz.d/$$t.log; exit 1; }; \
	done

# you want to know how fast it is here, against this machine's memory and, with LLAMA_BENCH=path of
# a llama-bench, against llama.cpp, the better of its -fa 0 and -fa 1: a row for each of FORMATS.
bench: SCENARIO = threads-all
# you want to know how fast other uses of it are: all of this list, or those that SCENARIO= names
scenarios: FORMATS = q4_K
FORMATS ?= q4_0 q8_0 q4_K q5_K q6_K q2_K q3_K iq4_xs mxfp4 f16
THREADS ?= $(shell nproc 2>/dev/null || sysctl -n hw.perflevel0.physicalcpu 2>/dev/null || \
    sysctl -n hw.physicalcpu)
BENCH_DIR ?= $(or $(TMPDIR),/tmp)
# Kinds and shapes are those of run_scenario and BENCH_SHAPES in test.c; `speed` is llm --bench. The
# numbers: tokens of prompt and of answer, window (0: all), chunk, threads.
define SCENARIOS
first-token     load   dense    16 1      0 512 $(THREADS)
short-short     warm   dense    16 64     0 512 $(THREADS)
short-long      warm   dense    64 512    0 512 $(THREADS)
long-short      warm   dense    2048 32   0 512 $(THREADS)
long-4096       warm   dense    4096 128  0 512 $(THREADS)
long-16384      warm   dense    16384 32  0 512 $(THREADS)
window-512      warm   dense    16 2048   512 512 $(THREADS)
second-reused   reuse  dense    2048 64   0 512 $(THREADS)
second-again    again  dense    2048 64   0 512 $(THREADS)
batch-32        warm   dense    512 64    0 32 $(THREADS)
batch-128       warm   dense    512 64    0 128 $(THREADS)
threads-1       warm   dense    512 64    0 512 1
threads-half    warm   dense    512 64    0 512 $(shell echo $$((($(THREADS) + 1) / 2)))
threads-all     speed  dense    512 64    0 512 $(THREADS)
experts         warm   experts  512 64    0 512 $(THREADS)
hybrid          warm   hybrid   512 64    0 512 $(THREADS)
state-space     warm   mamba    512 64    0 512 $(THREADS)
latent          warm   compressed 512 64  0 512 $(THREADS)
vectors         embed  vectors  512 0     0 512 $(THREADS)
endef
define MEASURE
dir=$$(mktemp -d "$(BENCH_DIR)/llm-bench.XXXXXX") || exit 1
trap 'rm -rf "$$dir"; exit' 0 2
peer() {
    "$${LLAMA_BENCH:-true}" -m "$$dir/model" -t $$threads -ub $$chunk -fa 0,1 -r 1 -o csv "$$@" || :
}
median() {   # of a figure in what the runs printed, the least and the most; llama.cpp's has its -fa
    awk '/^prefill/ { print "in", $$4 }
        /^decode/ { print "out", $$4 "\nrate", $$6 "\nshare", $$8 }
        /^ours/ { print "first", $$2 "\nin", $$3 "\nout", $$4 "\npeak", $$5 }
        /^build_commit/ { for (i = split($$0, f, ","); i > 0; i--) at[f[i]] = i }
        gsub(/^"|"$$/, "") {
            split($$0, f, "\",\"")
            print (f[at["n_gen"]] > 0 ? "out" : "in") f[at["flash_attn"]], f[at["avg_ts"]]
        }' "$$dir/runs" | sed -n "s/^$$1 //p" | sort -n | awk '{ a[NR] = $$1 } END {
            print a[1] + 0 ? sprintf("%.1f (%.1f-%.1f)", a[int((NR + 1) / 2)], a[1], a[NR]) : "-" }'
}
echo "$(THREADS) threads, $$($(CC) --version | head -n 1), medians of 5 runs, 3 if over 4,095 in"
echo "| scenario | format | first token ms | in tok/s | out tok/s | peak MB | GB/s |" \
    "% of bandwidth | llama.cpp: in tok/s | ours x | out tok/s | ours x |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
for t in $(FORMATS); do
    echo "$$SCENARIOS" | while read -r name kind shape p n window chunk threads; do
        case " $(or $(SCENARIO),$$name) " in *" $$name "*) ;; *) continue;; esac
        ./test_plain model $$t "$$dir/model" $$shape || exit 1
        for run in 1 2 3 $$([ $$p -ge 4096 ] || echo 4 5); do
            if [ $$kind = speed ]; then ./llm "$$dir/model" --cpu -t $$threads --bench $$p,$$n
            else ./test_native scenario $$kind "$$dir/model" $$p $$n $$window $$chunk $$threads
            fi || exit 1
            case $$kind$$window in
            speed0 | warm0) peer -p $$p -n 0; peer -p 0 -n $$n -d $$p;;
            embed0) peer -embd 1 -p $$p -n 0;;
            esac
        done < /dev/null > "$$dir/runs" || exit 1
        grep '^"' "$$dir/runs" >> "$$dir/peer"
        printf "| %s, %s in, %s out | %s |" $$name $$p $$n $$t
        for f in first in out peak rate share; do printf " %s |" "$$(median $$f)"; done
        for f in in out; do
            best=$$({ median $${f}0; median $${f}1; } | sort -n | tail -n 1)
            awk -v a="$$(median $$f)" -v b="$$best" 'BEGIN {
                printf " %s | %s |", b, b + 0 ? sprintf("%.2f", a / b) : "-" }'
        done
        echo
    done || exit 1
done
cut -d, -f 1-5 "$$dir/peer" | sort -u
endef
bench scenarios: llm test_native test_plain
	@eval "$$MEASURE"

clean:
	rm -rf llm llm.flags test.log test_arm test_fuzz test_fuzz.d \
	    $(foreach b,$(BUILDS),$b $b.flags $b.log $b.dSYM)

# the shell takes from its environment what may have blanks
export PREFIX DESTDIR SCENARIOS MEASURE
install: llm
	install -d "$$DESTDIR$$PREFIX/bin"
	install llm "$$DESTDIR$$PREFIX/bin/llm"
uninstall:
	rm -f "$$DESTDIR$$PREFIX/bin/llm"

.PHONY: all run test test-cuda bench-cuda valgrind test-arm tsan lint fuzz bench scenarios clean \
    install uninstall always
