// Vectors of float32 for each instruction set, with the same operations, so that a kernel is written once.
// All vectors compute the same bits, except in the portable fma: reductions over lanes have one order, and
// longer sums are computed in sixteen lanes (LaneSums) whatever the vector's width.
#pragma once

#include <cmath>

#include "common.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Unrolls the loop that follows, so that its vectors stay in registers.
#define UNROLLED _Pragma("GCC unroll 8")

namespace streamserve {

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define STREAMSERVE_VNNI256
// Add to each 32-bit sum the products of the four unsigned bytes of w and the four signed bytes of x there.
inline void dot_bytes(__m256i& sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#endif
}
#endif

// Eight floats in plain C++. Products are rounded before they are added (-ffp-contract=off): a fused
// multiply-add in software takes ten times as long.
struct VecPortable {
    static constexpr int lanes = 8;
    static constexpr float no_power = -127;  // the argument for which `scaled` returns zero
    float v[lanes];

    template <class F>
    static VecPortable make(F value) {
        VecPortable out;
        for (int i = 0; i < lanes; i++) out.v[i] = value(i);
        return out;
    }
    static VecPortable set(float x) {
        return make([&](int) { return x; });
    }
    template <class T>
    static VecPortable load(const T* p) {
        return make([&](int i) { return widen(p[i]); });
    }
    // Load two vectors of a packed weight (gemm.h): adjacent vectors or, in bf16, alternating numbers of the two.
    template <class T>
    static void load_tile(const T* p, VecPortable& a, VecPortable& b) {
        a = load(p), b = load(p + lanes);
    }
    static void load_tile(const bf16* p, VecPortable& a, VecPortable& b) {
        a = make([&](int i) { return widen(p[2 * i]); });
        b = make([&](int i) { return widen(p[2 * i + 1]); });
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    void store(bf16* p) const {
        for (int i = 0; i < lanes; i++) p[i] = round_bf16(v[i]);
    }
    // Store the numbers rounded to the nearest integers, ties to even.
    void store(int8_t* p) const {
        for (int i = 0; i < lanes; i++) p[i] = int8_t(std::nearbyint(v[i]));
    }
    VecPortable rounded() const {
        return make([&](int i) { return widen(round_bf16(v[i])); });
    }
    VecPortable operator+(VecPortable o) const {
        return make([&](int i) { return v[i] + o.v[i]; });
    }
    VecPortable operator-(VecPortable o) const {
        return make([&](int i) { return v[i] - o.v[i]; });
    }
    VecPortable operator*(VecPortable o) const {
        return make([&](int i) { return v[i] * o.v[i]; });
    }
    VecPortable operator/(VecPortable o) const {
        return make([&](int i) { return v[i] / o.v[i]; });
    }
    VecPortable max(VecPortable o) const {
        return make([&](int i) { return v[i] > o.v[i] ? v[i] : o.v[i]; });
    }
    VecPortable min(VecPortable o) const {
        return make([&](int i) { return v[i] < o.v[i] ? v[i] : o.v[i]; });
    }
    VecPortable nearest() const {
        return make([&](int i) { return std::nearbyint(v[i]); });
    }
    // Return the numbers times 2 to the power of `n`: whole numbers from -126 to 127, or no_power.
    VecPortable scaled(VecPortable n) const {
        return make([&](int i) {
            uint32_t bits = uint32_t(int32_t(n.v[i]) + 127) << 23;
            float power;
            std::memcpy(&power, &bits, 4);
            return v[i] * power;
        });
    }
    // Return the numbers in lanes where `x` is at least `limit`, and zero in the other lanes.
    VecPortable where_at_least(VecPortable x, float limit) const {
        return make([&](int i) { return x.v[i] >= limit ? v[i] : 0.0f; });
    }
    float sum() const { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
    float largest() const {
        float out = v[0];
        for (float x : v) out = x > out ? x : out;
        return out;
    }
};

inline VecPortable fma(VecPortable a, VecPortable b, VecPortable c) { return a * b + c; }
inline void accumulate(VecPortable& sum, VecPortable a, VecPortable b) { sum = fma(a, b, sum); }

#if defined(__AVX2__) && defined(__FMA__)
struct Vec256 {
    static constexpr int lanes = 8;
    static constexpr uint32_t MASK = 0xffff0000;
    static constexpr float no_power = -127;
    __m256 v;

    static Vec256 set(float x) { return {_mm256_set1_ps(x)}; }
    static Vec256 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec256 load(const bf16* p) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static Vec256 load(const int8_t* p) {
        __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
    }
    static Vec256 load(const f16* p) {
#ifdef __F16C__
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
#else
        return {_mm256_setr_ps(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]), widen(p[4]), widen(p[5]),
                               widen(p[6]), widen(p[7]))};
#endif
    }
    static Vec256 load(const e8m0* p) {
        __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23))};
    }
    static Vec256 load(const e4m3* p) {
#ifdef __F16C__
        // Sign extension fills the upper byte with the sign. Shifted left by 7, the exponent and fraction are
        // where float16 has them, with a copy of the sign above them, which the mask removes.
        __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(int16_t(0xbf80))))};
#else
        return {_mm256_setr_ps(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]), widen(p[4]), widen(p[5]),
                               widen(p[6]), widen(p[7]))};
#endif
    }
    template <class T>
    static void load_tile(const T* p, Vec256& a, Vec256& b) {
        a = load(p), b = load(p + lanes);
    }
    static void load_tile(const bf16* p, Vec256& a, Vec256& b) {
        halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), a, b);
    }
    // Split each 32-bit word into two bf16 numbers: the lower halves to `a`, the upper halves to `b`.
    static void halves(__m256i both, Vec256& a, Vec256& b) {
        // `volatile` keeps the mask in memory, which leaves one more register for sums.
        alignas(32) static const volatile uint32_t upper[8] = {MASK, MASK, MASK, MASK, MASK, MASK, MASK, MASK};
        __m256i mask = *reinterpret_cast<const volatile __m256i*>(upper);
        a = {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))};
        b = {_mm256_castsi256_ps(_mm256_and_si256(both, mask))};
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    // Return the upper halves of the lanes (bf16), rounded to nearest, ties to even. A NaN stays a NaN.
    __m256i upper() const {
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    }
    void store(bf16* p) const {
        __m256i high = upper();
        __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    }
    void store(int8_t* p) const {
        __m256i whole = _mm256_cvtps_epi32(v);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
    }
    Vec256 rounded() const { return {_mm256_castsi256_ps(_mm256_slli_epi32(upper(), 16))}; }
    Vec256 operator+(Vec256 o) const { return {_mm256_add_ps(v, o.v)}; }
    Vec256 operator-(Vec256 o) const { return {_mm256_sub_ps(v, o.v)}; }
    Vec256 operator*(Vec256 o) const { return {_mm256_mul_ps(v, o.v)}; }
    Vec256 operator/(Vec256 o) const { return {_mm256_div_ps(v, o.v)}; }
    Vec256 max(Vec256 o) const { return {_mm256_max_ps(v, o.v)}; }
    Vec256 min(Vec256 o) const { return {_mm256_min_ps(v, o.v)}; }
    Vec256 nearest() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    Vec256 scaled(Vec256 n) const {
        __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
        return {_mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
    }
    Vec256 where_at_least(Vec256 x, float limit) const {
        return {_mm256_and_ps(v, _mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_GE_OQ))};
    }
    float sum() const {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    float largest() const {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
};

inline Vec256 fma(Vec256 a, Vec256 b, Vec256 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }

// Assembly keeps the sum in its register: otherwise gcc moves twelve sums around until some are spilled.
inline void accumulate(Vec256& sum, Vec256 a, Vec256 b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(a.v), "x"(b.v));
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define STREAMSERVE_AVX512
struct Vec512 {
    static constexpr int lanes = 16;
    static constexpr float no_power = -127;
    __m512 v;

    static Vec512 set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec512 load(const bf16* p) {
        return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Vec512 load(const int8_t* p) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
    }
    static Vec512 load(const f16* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Vec512 load(const e8m0* p) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23))};
    }
    static Vec512 load(const e4m3* p) {
        __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xbf80)));
        return {_mm512_cvtph_ps(words)};
    }
    template <class T>
    static void load_tile(const T* p, Vec512& a, Vec512& b) {
        a = load(p), b = load(p + lanes);
    }
    static void load_tile(const bf16* p, Vec512& a, Vec512& b) {
        __m512i both = _mm512_loadu_si512(p);
        a = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
        b = {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
#ifdef __AVX512BF16__
    __m256i narrow() const { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
    __m256i narrow() const {
        __m512i bits = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
    }
#endif
    static Vec512 wide(__m256i half) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
    }
    void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow()); }
    void store(int8_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
    }
    Vec512 rounded() const { return wide(narrow()); }
    Vec512 operator+(Vec512 o) const { return {_mm512_add_ps(v, o.v)}; }
    Vec512 operator-(Vec512 o) const { return {_mm512_sub_ps(v, o.v)}; }
    Vec512 operator*(Vec512 o) const { return {_mm512_mul_ps(v, o.v)}; }
    Vec512 operator/(Vec512 o) const { return {_mm512_div_ps(v, o.v)}; }
    Vec512 max(Vec512 o) const { return {_mm512_max_ps(v, o.v)}; }
    Vec512 min(Vec512 o) const { return {_mm512_min_ps(v, o.v)}; }
    Vec512 nearest() const {
        return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    // Lanes that would underflow are masked: otherwise each one costs the processor a hundred cycles.
    Vec512 scaled(Vec512 n) const {
        __mmask16 normal = _mm512_cmp_ps_mask(n.v, _mm512_set1_ps(-126), _CMP_GE_OQ);
        return {_mm512_maskz_scalef_ps(normal, v, n.v)};
    }
    Vec512 where_at_least(Vec512 x, float limit) const {
        return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), v)};
    }
    float sum() const {
        return Vec256{_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))}.sum();
    }
    float largest() const { return _mm512_reduce_max_ps(v); }
};

inline Vec512 fma(Vec512 a, Vec512 b, Vec512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline void accumulate(Vec512& sum, Vec512 a, Vec512 b) { sum = fma(a, b, sum); }
#endif

// Sums of many numbers in sixteen lanes, the same order on all paths.
template <class V>
struct LaneSums {
    static constexpr int lanes = 16, parts = lanes / V::lanes;
    V part[parts];

    LaneSums() {
        for (V& sum : part) sum = V::set(0.0f);
    }
    // Add sixteen numbers. `value(i)` returns the vector of the numbers from i on.
    template <class F>
    void add(F&& value) {
        UNROLLED for (int i = 0; i < parts; i++) part[i] = part[i] + value(i * V::lanes);
    }
    template <class F>
    void add_squares(F&& value) {
        UNROLLED for (int i = 0; i < parts; i++) {
            V x = value(i * V::lanes);
            part[i] = fma(x, x, part[i]);
        }
    }
    float total() const {
        if constexpr (parts == 1) return part[0].sum();
        return (part[0] + part[parts - 1]).sum();
    }
};

// Return a vector function's value for one number.
template <class V, class F>
inline float lane_of(F&& function, float x) {
    float lanes[V::lanes];
    function(V::set(x)).store(lanes);
    return lanes[0];
}

// Return e to the power of x, to about one unit in the last place; 0 for x below -87, where float32 underflows.
template <class V>
inline V exponential(V x) {
    V inside = x.max(V::set(-87.0f)).min(V::set(88.0f));
    V n = (inside * V::set(1.44269504089f)).nearest();
    V r = fma(n, V::set(-0.693359375f), inside);
    r = fma(n, V::set(2.12194440e-4f), r);
    V p = V::set(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f}) {
        p = fma(p, r, V::set(c));
    }
    p = fma(fma(p, r, V::set(1.0f)), r, V::set(1.0f));
    return p.scaled(n).where_at_least(x, -87.0f);
}

// Return cap · tanh(x · scale), to about cap / 10^7; `scale` includes 1 / cap. For x that is not finite, return NaN.
template <class V>
inline V soft_cap(V x, V scale, V cap) {
    V one = V::set(1.0f), two = V::set(2.0f), inside = x * scale;
    V tangent = one - two / (exponential(inside * two) + one);
    return fma(x, V::set(0.0f), tangent * cap);
}

// Return 2 to the power of x, for x up to 127, to about two units in the last place; 0 where float32
// underflows. With r the fraction of x, 2^r = 1 + r · q(r), where q interpolates at five Chebyshev nodes of
// [-1/2, 1/2]. So the result is exactly 1 for x = 0.
template <class V>
inline V power_of_two(V x) {
    V inside = x.max(V::set(V::no_power));
    V n = inside.nearest(), r = inside - n;
    V q = V::set(1.3381302537e-3f);
    for (float c : {9.6663685154e-3f, 5.5503810138e-2f, 2.4022349038e-1f, 6.9314718056e-1f, 1.0f}) {
        q = fma(q, r, V::set(c));
    }
    return q.scaled(n);
}

}  // namespace streamserve
