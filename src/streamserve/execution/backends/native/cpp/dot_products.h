// Integer products of weights in 8 or 4 bits with activations in 8 bits, for each set of instructions, and
// the rounding of activations. The sums are exact, so all sets give the same numbers (gemm_int.cpp).
#pragma once

#include <cmath>

#include "common.h"
#include "vec.h"

namespace streamserve {

namespace {

// Integer sums for `lanes` columns; `add` adds products of four k. `signed8`: `add` subtracts 128 from 8-bit weights.
struct DotPortable {
    using V = VecPortable;
    static constexpr int lanes = 8, at_once = 2, rows = 2;
    static constexpr bool signed8 = false;
    int32_t v[lanes];

    struct Bytes {
        uint8_t b[4 * lanes];
    };
    static Bytes load(const uint8_t* p) {
        Bytes out;
        std::memcpy(out.b, p, sizeof out.b);
        return out;
    }
    static void store(uint8_t* p, Bytes w) { std::memcpy(p, w.b, sizeof w.b); }
    static Bytes low(Bytes w) {
        for (uint8_t& b : w.b) b &= 15;
        return w;
    }
    static Bytes high(Bytes w) {
        for (uint8_t& b : w.b) b >>= 4;
        return w;
    }
    static Bytes table(const uint8_t* p) {
        Bytes out{};
        std::memcpy(out.b, p, 16);
        return out;
    }
    static Bytes look_up(const Bytes& table, Bytes w) {
        for (uint8_t& b : w.b) b = table.b[b];
        return w;
    }
    struct Four {
        int8_t b[4];
    };
    static Four broadcast(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
    static DotPortable all(int32_t x) {
        DotPortable out;
        for (int32_t& one : out.v) one = x;
        return out;
    }
    template <int BITS>
    void add(Bytes w, Four x) {
        for (int i = 0; i < lanes; i++) {
            for (int j = 0; j < 4; j++) v[i] += int32_t(w.b[4 * i + j]) * x.b[j];
        }
    }
    V floats() const {
        return V::make([&](int i) { return float(v[i]); });
    }

    // For the rounding of activations: the vector has integers of `lanes` numbers.
    static DotPortable magnitudes(V x) {
        DotPortable out;
        std::memcpy(out.v, x.v, sizeof out.v);
        for (int32_t& bits : out.v) bits &= 0x7fffffff;
        return out;
    }
    static DotPortable larger(DotPortable a, DotPortable b) {
        for (int i = 0; i < lanes; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
        return a;
    }
    int32_t largest() const {
        int32_t out = 0;
        for (int32_t x : v) out = x > out ? x : out;
        return out;
    }
    static DotPortable nearest(V x) {
        DotPortable out;
        for (int i = 0; i < lanes; i++) {
            float rounded = std::nearbyint(x.v[i]);
            out.v[i] = rounded >= -127.0f && rounded <= 127.0f ? int32_t(rounded) : 0;
        }
        return out;
    }
    void plus(DotPortable o) {
        for (int i = 0; i < lanes; i++) v[i] += o.v[i];
    }
    void narrow(int8_t* to) const {
        for (int i = 0; i < lanes; i++) to[i] = int8_t(v[i]);
    }
    int32_t total() const {
        int32_t out = 0;
        for (int32_t x : v) out += x;
        return out;
    }
};

// a * b + c with a single rounding, by the C++ library's function.
inline VecPortable fused(VecPortable a, VecPortable b, VecPortable c) {
    return VecPortable::make([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}

#if defined(__AVX2__) && defined(__FMA__)
struct Dot256 {
    using V = Vec256;
    static constexpr int lanes = 8, at_once = 2, rows = 4;
#ifdef STREAMSERVE_VNNI256
    static constexpr bool signed8 = false;
#else
    static constexpr bool signed8 = true;
#endif
    __m256i v;

    using Bytes = __m256i;
    static Bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(uint8_t* p, Bytes w) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w); }
    static Bytes low(Bytes w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
    static Bytes high(Bytes w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }
    static Bytes table(const uint8_t* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static Bytes look_up(Bytes table, Bytes w) { return _mm256_shuffle_epi8(table, w); }
    static __m256i broadcast(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm256_set1_epi32(four);
    }
    static Dot256 all(int32_t x) { return {_mm256_set1_epi32(x)}; }
    // Without VNNI, pairs of products are summed in 16 bits, which hold 2 · 128 · 127 but not 2 · 255 · 127. So 128
    // is subtracted from 8-bit weights, and their sign is moved to x, as the instruction takes unsigned weights.
    template <int BITS>
    void add(Bytes w, __m256i x) {
#ifdef STREAMSERVE_VNNI256
        dot_bytes(v, w, x);
#else
        // Assembly: otherwise gcc delays the additions, and moves products to the stack and back.
        asm("vpaddd %1, %0, %0" : "+x"(v) : "x"(products<BITS>(w, x)));
#endif
    }
    template <int BITS>
    static __m256i products(Bytes w, __m256i x) {
#ifdef STREAMSERVE_VNNI256
        __m256i sum = _mm256_setzero_si256();
        dot_bytes(sum, w, x);
        return sum;
#else
        if constexpr (BITS == 8) {
            w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            x = _mm256_sign_epi8(x, w);
            w = _mm256_abs_epi8(w);
        }
        return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#endif
    }

    // Sums of a run of up to eight lines of weights. Without VNNI, sums with 4-bit weights are of pairs of k, in 16 bits,
    // which hold 8 · 2 · 15 · 127: so the multiplication that adds pairs is done once a run, not once a line.
    template <int BITS>
    struct Run {
        static constexpr bool pairs = signed8 && BITS == 4;
        __m256i v = _mm256_setzero_si256();

        static Run of(Bytes w, __m256i x) {
            if constexpr (pairs) return {_mm256_maddubs_epi16(w, x)};
            return {products<BITS>(w, x)};
        }
        void add(Bytes w, __m256i x) {
            if constexpr (pairs) {
                asm("vpaddw %1, %0, %0" : "+x"(v) : "x"(_mm256_maddubs_epi16(w, x)));
            } else {
                Dot256 sum{v};
                sum.template add<BITS>(w, x);
                v = sum.v;
            }
        }
        Dot256 total() const {
            if constexpr (pairs) return {_mm256_madd_epi16(v, _mm256_set1_epi16(1))};
            return {v};
        }
    };

    static Dot256 load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    void store(int32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    V floats() const { return {_mm256_cvtepi32_ps(v)}; }

    static Dot256 magnitudes(V x) {
        return {_mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff))};
    }
    static Dot256 larger(Dot256 a, Dot256 b) { return {_mm256_max_epi32(a.v, b.v)}; }
    int32_t largest() const {
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
    static Dot256 nearest(V x) { return {_mm256_cvtps_epi32(x.v)}; }
    void plus(Dot256 o) { v = _mm256_add_epi32(v, o.v); }
    void narrow(int8_t* to) const {
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
    }
    int32_t total() const {
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
};

inline Vec256 fused(Vec256 a, Vec256 b, Vec256 c) { return fma(a, b, c); }
#endif

#if defined(STREAMSERVE_AVX512) && defined(__AVX512VNNI__)
struct Dot512 {
    using V = Vec512;
    static constexpr int lanes = 16, at_once = 4, rows = 6;
    static constexpr bool signed8 = false;
    __m512i v;

    using Bytes = __m512i;
    static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static void store(uint8_t* p, Bytes w) { _mm512_storeu_si512(p, w); }
    static Bytes low(Bytes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
    static Bytes high(Bytes w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
    static Bytes table(const uint8_t* p) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static Bytes look_up(Bytes table, Bytes w) { return _mm512_shuffle_epi8(table, w); }
    static __m512i broadcast(const int8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return _mm512_set1_epi32(four);
    }
    static Dot512 all(int32_t x) { return {_mm512_set1_epi32(x)}; }
    template <int BITS>
    void add(Bytes w, __m512i x) {
        // Assembly keeps the sum in its register: otherwise gcc moves 24 sums to the stack and back.
        asm("vpdpbusd %2, %1, %0" : "+v"(v) : "v"(w), "v"(x));
    }
    V floats() const { return {_mm512_cvtepi32_ps(v)}; }
    static Dot512 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }

    static Dot512 magnitudes(V x) {
        return {_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff))};
    }
    static Dot512 larger(Dot512 a, Dot512 b) { return {_mm512_max_epi32(a.v, b.v)}; }
    int32_t largest() const { return _mm512_reduce_max_epi32(v); }
    static Dot512 nearest(V x) { return {_mm512_cvtps_epi32(x.v)}; }
    void plus(Dot512 o) { v = _mm512_add_epi32(v, o.v); }
    void narrow(int8_t* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(v));
    }
    int32_t total() const { return _mm512_reduce_add_epi32(v); }
};

inline Vec512 fused(Vec512 a, Vec512 b, Vec512 c) { return fma(a, b, c); }
#endif

}  // namespace

}  // namespace streamserve
