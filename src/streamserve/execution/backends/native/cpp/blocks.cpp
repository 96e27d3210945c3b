#include "blocks.h"

namespace streamserve {

namespace {

constexpr int BLOCK = 32, LARGE_BLOCK = LEVEL_K;

constexpr int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float half(const uint8_t* from) {
    f16 value;
    std::memcpy(&value, from, sizeof value);
    return widen(value);
}

// Unpack numbers of WIDTH bits: from each RUN of bytes, first the lowest bits of all bytes, then the next
// higher bits of all bytes, and so on. `put(to, number)` stores a number.
template <int WIDTH, int RUN, class Put>
inline void each_bits(const uint8_t* __restrict from, int bytes, uint8_t* __restrict to, Put&& put) {
    for (int run = 0; run < bytes; run += RUN) {
        for (int shift = 0; shift < 8; shift += WIDTH, to += RUN) {
            for (int i = 0; i < RUN; i++) put(to[i], uint8_t(from[run + i] >> shift & ((1 << WIDTH) - 1)));
        }
    }
}

template <int WIDTH, int RUN>
inline void put_bits(const uint8_t* from, int bytes, uint8_t* to) {
    each_bits<WIDTH, RUN>(from, bytes, to, [](uint8_t& number, uint8_t bits) { number = bits; });
}

// Unpack bits as put_bits does, and add them to the numbers above the UP bits that these already have.
template <int WIDTH, int RUN, int UP>
inline void add_bits(const uint8_t* from, int bytes, uint8_t* to) {
    each_bits<WIDTH, RUN>(from, bytes, to, [](uint8_t& number, uint8_t bits) { number = uint8_t(number | bits << UP); });
}

// Unpack 16 bytes as put_bits<4, 16> does; compilers do not vectorize that.
inline void halves(const uint8_t* from, uint8_t* to) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
    for (int i = 0; i < BLOCK / 2; i += 8) {
        uint64_t bytes, half;
        std::memcpy(&bytes, from + i, 8);
        half = bytes & LOW, std::memcpy(to + i, &half, 8);
        half = bytes >> 4 & LOW, std::memcpy(to + BLOCK / 2 + i, &half, 8);
    }
}

// Add a fifth bit to each of 32 numbers. The first number's bit is the lowest.
inline void fifth_bits(const uint8_t* __restrict from, uint8_t* __restrict to) {
    for (int i = 0; i < BLOCK; i++) to[i] = uint8_t(to[i] | (from[i / 8] >> i % 8 & 1) << 4);
}

template <int SIZE>
inline void shift_up(uint8_t* numbers, int by) {
    for (int i = 0; i < SIZE; i++) numbers[i] = uint8_t(numbers[i] + by);
}

void q4_0(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    halves(block + 2, numbers);
    to.scales[0] = half(block);
}

void q4_1(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    halves(block + 4, numbers);
    to.scales[0] = half(block);
    to.minimums[0] = half(block + 2);
}

void q5_0(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    halves(block + 6, numbers);
    fifth_bits(block + 2, numbers);
    shift_up<BLOCK>(numbers, 128 - 16);
    to.scales[0] = half(block);
}

void q5_1(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    halves(block + 8, numbers);
    fifth_bits(block + 4, numbers);
    to.scales[0] = half(block);
    to.minimums[0] = half(block + 2);
}

void q8_0(const uint8_t* __restrict block, uint8_t* __restrict numbers, const GroupTables& to) {
    for (int i = 0; i < BLOCK; i++) numbers[i] = block[2 + i] ^ 128;
    to.scales[0] = half(block);
}

// The scale is 2^(e - 128). For e = 0 and 1 it is a float32 without exponent (subnormal).
void mxfp4(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    halves(block + 1, numbers);
    uint32_t exponent = block[0], bits = exponent < 2 ? 1u << (21 + exponent) : (exponent - 1) << 23;
    std::memcpy(to.scales, &bits, 4);
}

void iq4_xs(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    to.supers[0] = half(block);
    for (int i = 0; i < 8; i++) {
        int scale = (block[4 + i / 2] >> 4 * (i % 2) & 15) | (block[2 + i / 4] >> 2 * (i % 4) & 3) << 4;
        to.scales[i] = float(scale - 32);
    }
    for (int i = 0; i < LARGE_BLOCK; i += BLOCK) halves(block + 8 + i / 2, numbers + i);
}

void q2_k(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    to.supers[0] = half(block + 80), to.least[0] = -half(block + 82);
    for (int i = 0; i < 16; i++) {
        to.scales[i] = float(block[i] & 15);
        to.minimums[i] = float(block[i] >> 4);
    }
    put_bits<2, 32>(block + 16, LARGE_BLOCK / 4, numbers);
}

// A number is its three bits - 4. The weight's four bits have the middle 8, so 4 is added.
void q3_k(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    uint8_t packed[16];
    put_bits<4, 8>(block + 96, 8, packed);
    add_bits<2, 4, 4>(block + 104, 4, packed);
    to.supers[0] = half(block + 108);
    for (int i = 0; i < 16; i++) to.scales[i] = float(int(packed[i]) - 32);
    put_bits<2, 32>(block + 32, LARGE_BLOCK / 4, numbers);
    add_bits<1, 32, 2>(block, LARGE_BLOCK / 8, numbers);
    shift_up<LARGE_BLOCK>(numbers, 4);
}

// Unpack eight scales and minimums of 6 bits. The last four have their upper two bits in the upper bits of
// the first eight bytes.
void scales_and_minimums(const uint8_t* packed, const GroupTables& to) {
    for (int i = 0; i < 4; i++) {
        int first = packed[i], second = packed[4 + i], last = packed[8 + i];
        to.scales[i] = float(first & 63);
        to.scales[4 + i] = float((last & 15) | (first >> 2 & 48));
        to.minimums[i] = float(second & 63);
        to.minimums[4 + i] = float(last >> 4 | (second >> 2 & 48));
    }
}

void q4_k(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    to.supers[0] = half(block), to.least[0] = -half(block + 2);
    scales_and_minimums(block + 4, to);
    put_bits<4, 32>(block + 16, LARGE_BLOCK / 2, numbers);
}

void q5_k(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    to.supers[0] = half(block), to.least[0] = -half(block + 2);
    scales_and_minimums(block + 4, to);
    put_bits<4, 32>(block + 48, LARGE_BLOCK / 2, numbers);
    add_bits<1, 32, 4>(block + 16, LARGE_BLOCK / 8, numbers);
}

void q6_k(const uint8_t* block, uint8_t* numbers, const GroupTables& to) {
    to.supers[0] = half(block + 208);
    for (int i = 0; i < 16; i++) to.scales[i] = float(int8_t(block[192 + i]));
    put_bits<4, 64>(block, LARGE_BLOCK / 2, numbers);
    add_bits<2, 32, 4>(block + 128, LARGE_BLOCK / 4, numbers);
    shift_up<LARGE_BLOCK>(numbers, 128 - 32);
}

using Unpack = void(const uint8_t*, uint8_t*, const GroupTables&);

// Unpack all blocks of `k` numbers.
template <Unpack UNPACK, int SIZE, int BYTES, int GROUP>
void all(const uint8_t* blocks, int k, uint8_t* numbers, GroupTables to) {
    for (int i = 0; i < k; i += SIZE, blocks += BYTES) {
        UNPACK(blocks, numbers + i, to);
        to.scales += SIZE / GROUP, to.minimums += SIZE / GROUP, to.supers++, to.least++;
    }
}

template <Unpack UNPACK, int SIZE, int BYTES, int GROUP>
constexpr BlockFormat format(int bits, bool symmetric, const int8_t* table = nullptr) {
    return {GROUP, bits, symmetric, SIZE == LEVEL_K, table, all<UNPACK, SIZE, BYTES, GROUP>};
}

constexpr BlockFormat FORMATS[] = {
    format<q4_0, 32, 18, 32>(4, true),
    format<q4_1, 32, 20, 32>(4, false),
    format<q5_0, 32, 22, 32>(8, true),
    format<q5_1, 32, 24, 32>(8, false),
    format<q8_0, 32, 34, 32>(8, true),
    format<q2_k, 256, 84, 16>(4, false),
    format<q3_k, 256, 110, 16>(4, true),
    format<q4_k, 256, 144, 32>(4, false),
    format<q5_k, 256, 176, 32>(8, false),
    format<q6_k, 256, 210, 16>(8, true),
    format<q4_0, 32, 18, 32>(4, true, IQ4_TABLE),
    format<iq4_xs, 256, 136, 32>(4, true, IQ4_TABLE),
    format<mxfp4, 32, 17, 32>(4, true, MXFP4_TABLE),
};
constexpr int32_t TYPES[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4};

}  // namespace

const BlockFormat* block_format(int type) {
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++) {
        if (TYPES[i] == type) return &FORMATS[i];
    }
    return nullptr;
}

}  // namespace streamserve
