# SPDX-License-Identifier: MIT

CC ?= cc
CFLAGS ?= -O3
# the CPU this is built on: SIMD is most of the speed; compilers use half of AVX-512 unless told so
NATIVE := $(shell for f in "-march=native -mprefer-vector-width=512" -march=native -mcpu=native; do \
    echo 'int x;' | $(CC) $$f -x c -c -o /dev/null - 2>/dev/null && echo $$f && break; done)
# -fno-trapping-math changes no result and lets loops that clamp become vector code; a hot loop that
# does not begin with a cache line can be 5 % slower
WARN = -std=gnu11 -Wall -Wextra -fno-trapping-math -falign-loops=64
LIBS = -lm -lpthread
ENGINE = llm.c quant.h metal.c kernels.metal
PREFIX ?= /usr/local

ifeq ($(shell uname),Darwin)
METAL = -DLLM_METAL -framework Metal -framework Foundation -framework CoreGraphics -lobjc
GPU = $(METAL)
else ifeq ($(shell uname),Linux)
GPU = -DLLM_CUDA -ldl
endif
# the tests use a GPU in software, on Apple the real one: the compiler must know half floats and, for
# the one in software, [[attributes]] in C
PROBE = _Float16 x; $(if $(METAL),,void f(int y [[x]]);)
ifeq ($(shell echo '$(PROBE)' | $(CC) -std=gnu11 -x c -c -o /dev/null - 2>/dev/null && echo yes),yes)
TEST_LIBS = $(or $(METAL),-DLLM_METAL -rdynamic -ldl) $(LIBS)
else
TEST_LIBS = $(LIBS)
endif
SANITIZE = -fno-sanitize-recover=all -fsanitize=address,undefined
# valgrind knows AVX2, but not AVX-512
ifeq ($(shell uname -m),x86_64)
AVX2 = -mavx2 -mfma -mf16c
endif

# you want to use it
all: llm

llm: $(ENGINE)
	$(CC) $(WARN) $(CFLAGS) $(NATIVE) llm.c -o $@ $(LIBS) $(GPU)

# you want to see it work: a story of some 150 words, another one for each SEED
SEED ?= 11
run: llm
	./llm golden/story.gguf "Once upon a time" -n 200 --temp 0.8 --top-k 40 --top-p 0.95 \
	    --repeat-penalty 1.1 --seed $(SEED)

# ---- tests ----

# Each build of the tests covers other code: this CPU's SIMD, the same in plain C, quant.h with four
# codes in a word as on a GPU, the plain engine of Part I alone; the first also under sanitizers, and
# AVX2 under valgrind, both with the lines that these name; what they do not read, the rest of -g,
# takes half of the time to compile. valgrind takes long for a multiply-add: compilers make none.
test_native: test.c $(ENGINE)
	$(CC) $(WARN) -O3 $(NATIVE) test.c -o $@ $(TEST_LIBS)
test_plain: test.c $(ENGINE)
	$(CC) $(WARN) -O1 -DQUANT_PLAIN test.c -o $@ $(TEST_LIBS)
test_words: test.c $(ENGINE)
	$(CC) $(WARN) -O1 -DQUANT_WORDS test.c -o $@ $(TEST_LIBS)
test_book: test.c $(ENGINE)
	$(CC) $(WARN) -O2 -DLLM_PLAIN test.c -o $@ $(LIBS)
test_avx2: test.c $(ENGINE)
	$(CC) $(WARN) -g1 -O2 -ffp-contract=off $(AVX2) test.c -o $@ $(TEST_LIBS)
test_asan: test.c $(ENGINE)
	$(CC) $(WARN) -g1 -O1 $(NATIVE) $(SANITIZE) test.c -o $@ $(TEST_LIBS)

# runs a command, says when it begins and how it ends; the rest is in its log
RUN = run() { name=$$1; shift; echo "$$name ..."; start=$$(date +%s); \
    { echo "== $$name"; "$$@"; echo "exit status $$?"; } > $@ 2>&1; \
    echo "$$name:" $$(tail -n 2 $@), $$(($$(date +%s) - start)) s; }; run
# adds up the logs, and names what failed: also a run without its count, or one that failed silently
SUM = awk '/^== / { name = substr($$0, 4) } \
    /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$$/ { p += $$1; f += $$3; s += $$5; said = 1; bad = $$3 } \
    /^exit status/ { if (!said || ($$3 != 0 && !bad)) f += bad = 1; if (bad) print "FAILED: " name; \
        said = bad = 0 } \
    END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 || p == 0 }' test.log
VALGRIND = valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,indirect

# what runs under the checkers in every test run (`make valgrind` runs all): what is slow there is
# left out; AddressSanitizer talks into metal_models, valgrind does not follow the command line
ALL = $(shell sed -n '/^static const Test TESTS/,/^}/{s/T(\([a-z_]*\))/\1/g; /^    /p;}' test.c)
MEMORY = $(filter-out metal_shapes tokenizer_linear unicode_tables, $(ALL))

# you changed something: everything that can be checked on this machine (about 6 minutes), two builds
# or runs at a time, the longest first; what they said is shown when all have ended
RUNS = $(if $(shell command -v valgrind 2>&1),valgrind) asan native plain words book lines
test:
	@rm -f test*.log
	@$(MAKE) --no-print-directory -j2 $(RUNS:%=test_%.log)
	@cat $(RUNS:%=test_%.log) > test.log; cat test.log
	@$(if $(filter valgrind,$(RUNS)),,echo "valgrind is not installed: the tests under it were left out";) \
	    $(SUM)

test_native.log: llm test_native
	@$(RUN) "optimised build" env LLM="./llm --cpu" ./test_native
test_plain.log: test_plain
	@$(RUN) "plain C" ./test_plain --quick
test_words.log: test_words
	@$(RUN) "quant.h as on a GPU" ./test_words --quick formats formats_grids \
	    $(filter metal_kernels, $(ALL))
test_book.log: test_book
	@$(RUN) "the plain engine" ./test_book --quick $(filter-out metal_% cli_output cli_numbers, $(ALL))
test_asan.log: test_asan
	@$(RUN) "address and undefined behaviour sanitizers" ./test_asan --quick \
	    $(filter-out metal_models, $(MEMORY))
test_valgrind.log: test_avx2
	@$(RUN) "valgrind" $(VALGRIND) ./test_avx2 --quick --quick $(filter-out cli_%, $(MEMORY))
test_lines.log:
	@$(RUN) "line budgets" $(MAKE) --no-print-directory lines

# you have an NVIDIA GPU: the kernels on it (NAME=metal_kernels: that test alone), and how fast they
# are (NAME=q4_0: the rows with that in their names)
test_cuda: test.c $(ENGINE)
	$(CC) $(WARN) -O3 $(NATIVE) -DLLM_CUDA test.c -o $@ $(LIBS) -ldl
test-cuda: test_cuda
	@./test_cuda $(or $(NAME),metal_kernels metal_models metal_shapes metal_failures)
bench-cuda: test_cuda
	@./test_cuda --bench "$(NAME)"

# you suspect memory: all tests, also those that are slow there
valgrind: llm test_avx2
	$(VALGRIND) ./test_avx2

# you have no ARM machine: NEON, with and without dot products of bytes, and 32 bits, in an emulator
# (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-arm-linux-gnueabihf qemu-user)
test-arm:
	for cc in "aarch64-linux-gnu-gcc -march=armv8-a" arm-linux-gnueabihf-gcc \
	    "aarch64-linux-gnu-gcc -march=armv8.2-a+dotprod"; do \
	    $$cc $(WARN) -O1 -static test.c -o test_arm $(LIBS) && qemu="qemu-$${cc%%-*} -cpu max" && \
	    LLM="$$qemu ./test_arm llm --cpu" $$qemu ./test_arm --quick || exit 1; \
	done

# you changed kernels.metal: races, and the address spaces, which only a C++ compiler sees
# (apt-get install clang)
tsan:
	$(CC) $(WARN) -O1 -g -fsanitize=thread test.c -o test_tsan $(TEST_LIBS)
	./test_tsan metal_kernels
# you changed what reads files or text: RUNS hostile inputs for each target (apt-get install clang).
# Decoders are not inlined here, nor inner loops observed, or clang would take long to compile this;
# NULL + 0, the end of an empty list, is allowed.
FUZZ ?= loader vocabulary tokenize detokenize template
UNSEEN = src:*quant.h fun:transpose fun:float_* fun:*matvec* fun:tile_* fun:int8_* fun:one_* fun:norm \
    fun:read_item fun:read_choice fun:item_length
fuzz:
	@clang -fsanitize=fuzzer -shared -x c -o /dev/null /dev/null 2> test.tmp || \
	    { echo "clang with libFuzzer is not installed: nothing is tried"; exit 0; }; \
	mkdir -p test_fuzz.d; printf '%s\n' $(patsubst %,'%',$(UNSEEN)) > test_fuzz.d/unseen; \
	clang $(WARN) -g -O1 $(AVX2) $(SANITIZE),fuzzer -fsanitize-coverage-ignorelist=test_fuzz.d/unseen \
	    -fno-sanitize=pointer-overflow -DLLM_FUZZ -Dalways_inline=noinline test.c -o test_fuzz $(LIBS) || exit 1; \
	for t in $(FUZZ); do \
	    most=200; n=2000000; mkdir -p test_fuzz.d/$$t; \
	    case $$t in loader) most=6000; n=10000000;; vocabulary) most=3000;; template) most=1000;; esac; \
	    ASAN_OPTIONS=quarantine_size_mb=4:detect_leaks=0 ./test_fuzz -runs=$(or $(RUNS),$$n) \
	        -max_len=$$most -mutate_depth=2 -timeout=60 -artifact_prefix=test_fuzz.d/$$t- \
	        test_fuzz.d/$$t 2> test_fuzz.d/$$t.log || { tail -n 40 test_fuzz.d/$$t.log; exit 1; }; \
	done
LINT = { sed -n '/^\#ifdef METAL_LINT/,/^\#endif/p' test.c; \
    cat quant.h; echo '\#undef __METAL_VERSION__'; sed 's/^constant /extern constant /' kernels.metal; } | \
    clang++ --target=aarch64-linux-gnu -DMETAL_LINT -D__METAL_VERSION__=310 -std=c++14 -fsyntax-only -x c++
lint:
	@command -v clang++ > /dev/null || { echo "clang++ is not installed: no lint"; exit 0; }; \
	$(LINT) -Wall -Wextra -Wshadow -Wdouble-promotion -Wno-unknown-attributes -Wno-sign-compare \
	    -Wno-unused -Wno-unused-parameter -Werror - && \
	$(LINT) -w -Xclang -ast-dump -fno-color-diagnostics - | awk ' \
	    /-(VarDecl|ParmVarDecl|FieldDecl|CStyleCastExpr) / { split($$0, q, "\047"); t = q[2]; \
	        if (t ~ /\*/ && t !~ /address_space|device |DEVICE |threadgroup |volatile /) \
	            { print "a pointer without address space: " $$0; bad = 1 } } \
	    /AddressSpaceConversion/ { print "a cast to another address space: " $$0; bad = 1 } \
	    / static( |$$)/ && /-VarDecl / { print "a static variable: " $$0; bad = 1 } \
	    END { if (!bad) print "kernels.metal and quant.h are clean"; exit bad }'

# you want to know how fast it is here, against this machine's memory and, with LLAMA_BENCH=path of
# a llama-bench, against llama.cpp, which also generates behind the prompt: medians of three runs, on
# models of random weights in BENCH_DIR
FORMATS ?= q4_0 q8_0 q4_K q5_K q6_K q2_K q3_K iq4_xs mxfp4 f16
THREADS ?= $(shell nproc 2>&1 || sysctl -n hw.perflevel0.physicalcpu)
BENCH_DIR ?= /tmp
# the speeds of the rows for the prompt and for generation in llama-bench's CSV
# (and in peer.log which llama.cpp it is)
PEER = awk -F, '/^build_commit/ { for (i = 1; i <= NF; i++) at[$$i] = i; next } \
    { gsub(/^"|"$$/, ""); split($$0, f, "\",\""); s = s sprintf(" %.2f", f[at["avg_ts"]]) } \
    END { print "peer" s; if (s) print "llama.cpp " f[at["build_commit"]] ", build " \
        f[at["build_number"]] ", " f[at["backends"]] ", on " f[at["cpu_info"]] > "peer.log" }'
PEER_BUILD = [ ! -s peer.log ] || cat peer.log; rm -f peer.log
bench: llm test_plain
	@echo "512 tokens of prompt, 64 of decode, $(THREADS) threads, $$($(CC) --version | head -n 1)"
	@printf "| format | prefill tok/s | decode tok/s | GB/s | of bandwidth | llama.cpp: prefill | decode |"
	@printf " prefill x | decode x |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
	@median() { grep "^$$1" bench.log | cut -d" " -f$$2 | sort -n | sed -n 2p; }; \
	for t in $(FORMATS); do \
	    m=$(BENCH_DIR)/llm-bench.gguf; ./test_plain model $$t $$m || exit 1; rm -f bench.log; \
	    for run in 1 2 3; do \
	        ./llm $$m --cpu -t $(THREADS) --bench 512,64 >> bench.log || exit 1; \
	        [ -z "$$LLAMA_BENCH" ] || for job in "-p 512 -n 0" "-p 0 -n 64 -d 512"; do \
	            "$$LLAMA_BENCH" -m $$m -t $(THREADS) $$job -r 1 -o csv; \
	        done | $(PEER) >> bench.log; \
	    done; \
	    echo $$t $$(median prefill 4) $$(median decode 4) $$(median decode 6) $$(median decode 8) \
	        $$(median peer 2) $$(median peer 3) | \
	        awk '{ printf "| %s | %s | %s | %s | %s %% |", $$1, $$2, $$3, $$4, $$5 } \
	            NF < 7 { print " - | - | - | - |" } NF > 6 { printf " %.1f | %.1f | %.2f | %.2f |\n", \
	                $$6, $$7, $$2 / $$6, $$3 / $$7 }'; rm -f $$m bench.log; \
	done; $(PEER_BUILD)

# you want to know how fast other uses of it are: a row of medians (least-most) of five runs, three
# from 4,096 tokens on, for each line of this list or for those that SCENARIO= names. A run is a
# process: what it measures stands at run_scenario in test.c. The numbers: tokens of prompt and of
# answer, window (0: all), chunk (0: the default), threads.
define SCENARIOS
first-token     load   dense    16 1      0 0 $(THREADS)
short-short     warm   dense    16 64     0 0 $(THREADS)
short-long      warm   dense    64 512    0 0 $(THREADS)
long-short      warm   dense    2048 32   0 0 $(THREADS)
long-4096       warm   dense    4096 128  0 0 $(THREADS)
long-16384      warm   dense    16384 32  0 0 $(THREADS)
window-512      warm   dense    16 2048   512 0 $(THREADS)
second-reused   reuse  dense    2048 64   0 0 $(THREADS)
second-again    again  dense    2048 64   0 0 $(THREADS)
batch-32        warm   dense    512 64    0 32 $(THREADS)
batch-128       warm   dense    512 64    0 128 $(THREADS)
batch-512       warm   dense    512 64    0 512 $(THREADS)
threads-1       warm   dense    512 64    0 0 1
threads-half    warm   dense    512 64    0 0 $(shell echo $$((($(THREADS) + 1) / 2)))
threads-all     warm   dense    512 64    0 0 $(THREADS)
experts         warm   experts  512 64    0 0 $(THREADS)
hybrid          warm   hybrid   512 64    0 0 $(THREADS)
state-space     warm   mamba    512 64    0 0 $(THREADS)
latent          warm   compressed 512 64  0 0 $(THREADS)
vectors         embed  vectors  512 0     0 0 $(THREADS)
endef
export SCENARIOS
scenarios: FORMATS = q4_K
scenarios: test_native test_plain
	@printf "| scenario | format | first token ms | prompt tok/s | decode tok/s | peak MB |"
	@printf " llama.cpp: prompt | decode |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
	@figures() { grep "^$$1" bench.log | cut -d" " -f$$2 | sort -n | awk '{ a[NR] = $$1 } \
	    END { print a[1] + 0 ? a[int((NR + 1) / 2)] " (" a[1] "-" a[NR] ")" : "-" }'; }; \
	peer() { [ -z "$$LLAMA_BENCH" ] || "$$LLAMA_BENCH" -m $$m -t $$threads -fa 1 -r 1 -o csv "$$@"; }; \
	for t in $(FORMATS); do \
	    echo "$$SCENARIOS" | while read -r name kind shape p n window chunk threads; do \
	        case " $(or $(SCENARIO),$$name) " in *" $$name "*) ;; *) continue;; esac; \
	        m=$(BENCH_DIR)/llm-bench-$$shape.gguf; rm -f bench.log; \
	        [ -s $$m ] || ./test_plain model $$t $$m $$shape || exit 1; \
	        batch=$${chunk#0}; batch=$${batch:+-b $$batch -ub $$batch}; \
	        for run in 1 2 3 4 5; do \
	            [ $$p -lt 4096 ] || [ $$run -le 3 ] || break; \
	            ./test_native scenario $$kind $$m $$p $$n $$window $$chunk $$threads >> bench.log || \
	                exit 1; \
	            case $$LLAMA_BENCH$$kind$$window in \
	            ?*warm0) { peer $$batch -p $$p -n 0; peer $$batch -p 0 -n $$n -d $$p; } | $(PEER);; \
	            ?*embed0) peer -embd 1 -p $$p -n 0 | $(PEER);; \
	            esac >> bench.log; \
	        done; \
	        printf "| %s " $$name $$t "$$(figures ours 2)" "$$(figures ours 3)" "$$(figures ours 4)" \
	            "$$(figures ours 5)" "$$(figures peer 2)" "$$(figures peer 3)"; echo "|"; \
	    done || exit 1; rm -f $(BENCH_DIR)/llm-bench-*.gguf bench.log; \
	done; $(PEER_BUILD)

# you wrote a lot: the budgets of each file, columns, comments, and lines that are packed
define LINES
function budget(name, n, most) {
    printf "%-52s %5d of %5d%s\n", name, n, most, (n > most ? "  TOO MANY" : "")
    if (n > most) failed++; else passed++
}
function share(name, n, least) {
    printf "%-52s %5.1f %%, %4.1f %% wanted%s\n", name, n, least, (n < least ? "  TOO FEW" : "")
    if (n < least) failed++; else passed++
}
FNR == 1 { part = FILENAME }
/^\/\/ ==== / { part = FILENAME " " $$3 " " $$4 }
/^\/\/ ---- (appendix|3\. the words|4\. three|8\. grids|9\. formats)/ { part = FILENAME " " $$4 }
/^static void forward\(/ { forward = FNR }
{ lines[FILENAME]++; part_lines[part]++; if (length($$0) > 100) wide++ }
{   # a line of code holds one statement; the head of a for loop holds three
    gsub(/"([^"\\]|\\.)*"|';'/, "")
    if (/\/\//) comments[part]++
    sub(/\/\/.*/, "")
    while (match($$0, /for \([^;]*;[^;]*;/)) $$0 = substr($$0, 1, RSTART - 1) substr($$0, RSTART + RLENGTH)
    n = gsub(/;/, "")
    if (n) { semicolons[FILENAME] += n; ends[FILENAME]++ }
}
END {
    unicode = part_lines["llm.c Unicode"]; grids = part_lines["quant.h grids"]; one = "llm.c Part I:"
    budget("llm.c", lines["llm.c"] - unicode, 7041); budget("  its Unicode tables", unicode, 250)
    budget("  Part I, the first sitting", part_lines[one], 1990)
    budget("  lines before forward", forward - 1, 1510)
    budget("  words of quant.h beside it", part_lines["quant.h the"], 375)
    budget("quant.h", lines["quant.h"] - grids, 1210); budget("  its grids", grids, 280)
    budget("metal.c", lines["metal.c"], 1360); budget("kernels.metal", lines["kernels.metal"], 1935)
    budget("test.c", lines["test.c"], 4752); budget("  the GPU in software", part_lines["test.c a GPU"], 785)
    budget("lines over 100 columns", wide, 0)
    for (file in lines) budget("semicolons on 100 lines of " file, 100 * semicolons[file] / ends[file], 130)
    share("comments in Part I of llm.c", 100 * comments[one] / part_lines[one], 20)
    for (p in part_lines) if (p ~ /^llm.c Part/ && p != one) {
        all += part_lines[p]; said += comments[p]
    }
    share("comments in its other parts", 100 * said / all, 100 / 7)
    printf "%d passed, %d failed, 0 skipped\n", passed, failed
    exit failed > 0
}
endef
export LINES
lines:
	@awk "$$LINES" llm.c quant.h metal.c kernels.metal test.c

# you want the characters of another Unicode: prints the tables in llm.c's appendix anew, from the
# standard's UnicodeData.txt (make unicode UCD=path/UnicodeData.txt); those in llm.c are of 15.1
define UNICODE_AWK
function hex(s,   n) {
    for (n = 0; s != ""; s = substr(s, 2)) n = 16 * n + index("123456789ABCDEF", substr(s, 1, 1))
    return n
}
# deepseek-llm has its own list of letters with case, class c: in these blocks all, elsewhere none
BEGIN { n_cased = split("80 556 10A0 10C5 13A0 13FD 1C90 2CFF A640 A78E AB70 FF5A " \
    "10400 104FB 10C80 10CF2 118A0 118DF 1E900 1E943", cased, " ") }
function class(c, category,   i) {   # a letter of "ulcxNMPSsC"
    if (category ~ /^Z/ || (c >= 9 && c <= 13) || c == 133) return "s"
    if (category !~ /^L/) return substr(category, 1, 1)
    if (c < 128) return category == "Lu" ? "u" : "l"
    for (i = 1; category ~ /^L[ult]/ && i < n_cased; i += 2)
        if (c >= hex(cased[i]) && c <= hex(cased[i + 1])) return "c"
    return "x"
}
function add(table, from, to, v,   n) {   # one more range, or the one before goes on
    n = ranges[table]
    if (n == 0 || from != end[table, n] + 1 || v != value[table, n]) {
        n = ++ranges[table]
        start[table, n] = from
        value[table, n] = v
    }
    end[table, n] = to
}
function number(n,   digits) {
    digits = sprintf("%c", 35 + n % 60)
    if (digits == "\\") digits = "\\\\"   # as C wants it
    for (n = int(n / 60); n > 0; n = int(n / 32)) digits = sprintf("%c", 95 + n % 32) digits
    return digits
}
# range number i, as the comment above the tables in llm.c says; afresh: it begins a line
function encode(table, i, afresh,   gap, more, change) {
    gap = start[table, i] - (afresh ? 0 : end[table, i - 1] + 1)
    more = end[table, i] - start[table, i]
    change = value[table, i] - (afresh ? 0 : value[table, i - 1])
    return number(2 * gap + (more > 0)) (more > 0 ? number(more) : "") \
        number(change < 0 ? -2 * change - 1 : 2 * change)
}
function print_table(table, comment,   i, line, code) {
    if (table != "CLASSES") print ""
    print "static const char *const UNICODE_" table "[] = {   // " comment
    for (i = 1; i <= ranges[table]; i++) {
        code = encode(table, i, line == "")
        if (length(line code) > 93) {   # with indent, quotes and comma it would not fit 100 columns
            print "    \"" line "\","
            line = ""
            code = encode(table, i, 1)
        }
        line = line code
    }
    print "    \"" line "\",\n};"
}
# the file is read twice, first for the first part of each character that consists of parts
NR == FNR { sub(/ .*/, "", $$6); if ($$6 ~ /^[0-9A-F]/) base[$$1] = $$6; next }
$$2 ~ /First>$$/ { first = hex($$1); next }
{
    last = hex($$1)
    if ($$2 !~ /Last>$$/) first = last
    add("CLASSES", first, last, index("ulcxNMPSsC", class(last, $$3)) - 1)
    change = hex($$14) - last
    # a letter whose lower case is its neighbour makes a pair with it: 0 if it is even, else -1
    if ($$14 != "" && change == 1) add("LOWER", last, last + 1, -(last % 2))
    else if ($$14 != "") add("LOWER", last, last, change)
    for (c = $$1; c in base; ) c = base[c]
    if ($$1 in base) add("BASE", last, last, hex(c))
    # the Hangul syllables are in the order of their first consonants, 588 for each
    if ($$2 ~ /^<Hangul/) for (i = first; i < last; i += 588)
        add("BASE", i, i + 587, hex("1100") + (i - first) / 588)
}
END {
    print_table("CLASSES", "the index into \"ulcxNMPSsC\" below")
    print_table("LOWER", "what to add; 0, -1: pairs, upper even, odd")
    print_table("BASE", "the character without its accents")
}
endef
export UNICODE_AWK
unicode:
	@awk -F ";" "$$UNICODE_AWK" "$(or $(UCD),$(error UCD=path of a UnicodeData.txt))" "$(UCD)"

clean:
	rm -f llm test_native test_plain test_words test_book test_avx2 test_asan test_arm test_tsan test_cuda \
	    test_fuzz *.log test.tmp
	rm -rf test_fuzz.d

# paths may have blanks: the shell takes them from its environment
export PREFIX DESTDIR
install: llm
	install -d "$$DESTDIR$$PREFIX/bin"
	install llm "$$DESTDIR$$PREFIX/bin/llm"
uninstall:
	rm -f "$$DESTDIR$$PREFIX/bin/llm"

.PHONY: all run test test-cuda bench-cuda valgrind test-arm tsan lint fuzz bench scenarios \
    lines unicode clean install uninstall
