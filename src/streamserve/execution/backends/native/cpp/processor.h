// The instructions that this processor has and the operating system lets programs use.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

namespace streamserve {

// Instructions, by the bit of a `cpuid` answer that says whether the processor has them. `states`: the
// register states (bits of xcr0) that they need.
struct Instructions {
    uint32_t leaf, subleaf;
    int answer;  // 0 to 3: eax, ebx, ecx, edx
    int bit;
    uint64_t states;
};

constexpr uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;
constexpr Instructions HAS_FMA{1, 0, 2, 12, YMM}, HAS_AVX2{7, 0, 1, 5, YMM};
constexpr Instructions HAS_AVX512DQ{7, 0, 1, 17, ZMM}, HAS_AVX512BW{7, 0, 1, 30, ZMM};
constexpr Instructions HAS_AVX512_BF16{7, 1, 0, 5, ZMM};
constexpr Instructions HAS_AMX_BF16{7, 0, 3, 22, TILES}, HAS_AMX_TILE{7, 0, 3, 24, TILES};

// Return the register states (bits of xcr0) that the operating system preserves; 0 if it does not say.
inline uint64_t kept_states() {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return uint64_t(d) << 32 | a;
}

inline bool processor_has(const Instructions& wanted) {
    uint32_t answers[4];
    return __get_cpuid_count(wanted.leaf, wanted.subleaf, &answers[0], &answers[1], &answers[2], &answers[3]) &&
           (answers[wanted.answer] >> wanted.bit & 1) && (kept_states() & wanted.states) == wanted.states;
}

// While a FlushTiny lives, the calling thread treats numbers below the smallest normal float32 as zero, as the
// instructions that multiply bf16 always do. With `on` false, the thread computes with such numbers exactly.
class FlushTiny {
  public:
    explicit FlushTiny(bool on = true) : before_(__builtin_ia32_stmxcsr()) {
        constexpr uint32_t FLUSH = FLUSH_RESULTS | FLUSH_INPUTS;
        __builtin_ia32_ldmxcsr(on ? before_ | FLUSH : before_ & ~FLUSH);
    }
    ~FlushTiny() { __builtin_ia32_ldmxcsr(before_); }
    FlushTiny(const FlushTiny&) = delete;
    FlushTiny& operator=(const FlushTiny&) = delete;

  private:
    static constexpr uint32_t FLUSH_RESULTS = 0x8000, FLUSH_INPUTS = 0x40;
    uint32_t before_;
};

}  // namespace streamserve
#else

namespace streamserve {

struct FlushTiny {
    explicit FlushTiny(bool = true) {}
};

}  // namespace streamserve
#endif
