// Measurement of the rate at which a path multiplies numbers in registers: the upper bound of its kernels' rates.
#include "gemm.h"
#include "vec.h"

// Unrolls the loop that follows completely: otherwise its sums would not stay in registers.
#define ALL_CHAINS _Pragma("GCC unroll 16")

namespace streamserve {

namespace {

constexpr int CHAINS = 12;  // independent sums: more than latency · number of multipliers

// Each round adds a product to every sum. An empty `asm` hides a register's value: the compiler would compute
// sums that it knows to be equal only once.
template <class V>
struct FusedSums {
    V sum[CHAINS], a = V::set(1.0f), b = V::set(0.5f);

    FusedSums() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) {
            sum[i] = V::set(0.0f);
            asm volatile("" : "+x"(sum[i].v));
        }
        asm volatile("" : "+x"(a.v), "+x"(b.v));
    }
    static constexpr double operations = 2.0 * CHAINS * V::lanes;
    void round() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) accumulate(sum[i], a, b);
    }
    float result() const {
        float total = 0;
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) total += sum[i].sum();
        return total;
    }
};

#ifdef __AVX512BF16__
struct DotBf16 {
    __m512 sum[CHAINS];
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;

    DotBf16() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) {
            sum[i] = _mm512_setzero_ps();
            asm volatile("" : "+x"(sum[i]));
        }
    }
    static constexpr double operations = 2.0 * CHAINS * 32;
    void round() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    }
    float result() const {
        float total = 0;
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) total += _mm512_reduce_add_ps(sum[i]);
        return total;
    }
};
#endif

#if defined(STREAMSERVE_AVX512) && defined(__AVX512VNNI__)
struct DotInt512 {
    __m512i sum[CHAINS];
    __m512i a = _mm512_set1_epi8(1), b = a;

    DotInt512() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) {
            sum[i] = _mm512_setzero_si512();
            asm volatile("" : "+x"(sum[i]));
        }
    }
    static constexpr double operations = 2.0 * CHAINS * 64;
    void round() {
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
    }
    float result() const {
        int total = 0;
        ALL_CHAINS for (int i = 0; i < CHAINS; i++) total += _mm512_reduce_add_epi32(sum[i]);
        return float(total);
    }
};
#endif

#if defined(__AVX2__)
struct DotInt256 {
    static constexpr int AT_ONCE = 8;  // sums; products need further registers, of which there are 16
    __m256i sum[AT_ONCE];
    __m256i a = _mm256_set1_epi8(1), b = a;

    DotInt256() {
        ALL_CHAINS for (int i = 0; i < AT_ONCE; i++) {
            sum[i] = _mm256_setzero_si256();
            asm volatile("" : "+x"(sum[i]));
        }
    }
    static constexpr double operations = 2.0 * AT_ONCE * 32;
    void round() {
        ALL_CHAINS for (int i = 0; i < AT_ONCE; i++) {
            __m256i hidden = a;
            asm volatile("" : "+x"(hidden));
#ifdef STREAMSERVE_VNNI256
            dot_bytes(sum[i], hidden, b);
#else
            __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(hidden, b), _mm256_set1_epi16(1));
            sum[i] = _mm256_add_epi32(sum[i], four);
#endif
        }
    }
    float result() const {
        __m256i total = sum[0];
        ALL_CHAINS for (int i = 1; i < AT_ONCE; i++) total = _mm256_add_epi32(total, sum[i]);
        return float(_mm256_extract_epi32(total, 0));
    }
};
#endif

#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
struct Tiles {
    static constexpr double operations = 2.0 * 4 * 16 * 16 * 32;
    Tiles() {
        amx_begin();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
    }
    ~Tiles() { amx_end(); }
    void round() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float result() const { return 0; }
};
#endif

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
struct IntegerTileSums : Tiles {
    static constexpr double operations = 2.0 * 4 * 16 * 16 * 64;
    void round() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
};
#endif

// Do `rounds` rounds, with the sums in registers. Return the number of operations.
template <class S>
double run(int rounds) {
    S sums;
    for (int i = 0; i < rounds; i++) sums.round();
    volatile float kept = sums.result();
    (void)kept;
    return S::operations * rounds;
}

}  // namespace

double multiply_registers(int path, int bits, int rounds) {
    if (bits == 8) {
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
        if (path == AMX) return run<IntegerTileSums>(rounds);
#endif
#if defined(STREAMSERVE_AVX512) && defined(__AVX512VNNI__)
        if (path >= AVX512) return run<DotInt512>(rounds);
#endif
#if defined(__AVX2__)
        if (path >= AVX2) return run<DotInt256>(rounds);
#endif
        return 0;
    }
    switch (path) {
#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
        case AMX: return run<Tiles>(rounds);
#endif
#ifdef __AVX512BF16__
        case AVX512_BF16: return run<DotBf16>(rounds);
#endif
#ifdef STREAMSERVE_AVX512
        case AVX512: return run<FusedSums<Vec512>>(rounds);
#endif
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return run<FusedSums<Vec256>>(rounds);
#endif
        default: return 0;
    }
}

}  // namespace streamserve
