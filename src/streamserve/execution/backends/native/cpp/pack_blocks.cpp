#include <cmath>

#include "blocks.h"
#include "elementwise.h"
#include "pack.h"
#include "panels.h"

namespace streamserve {

namespace {

// Return the bits of a number as float16. The number must be exact in float16.
uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
    if (exponent > 112) return uint16_t(sign | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
    return uint16_t(sign | uint32_t(std::fabs(x) * 0x1p24f));
}

// A group's scale and minimum: products of a number and a `super` scale, which is 1 for formats with one level.
struct GroupScale {
    float super, number, least, minimum;
    float scale() const { return super * number; }
    float offset() const { return least * minimum; }
};

// Where a group's scale is stored: `index` [panel][group][64] of the scale, and its group and column.
struct Place {
    size_t index;
    int group, column;
};

// Storage of scales and minimums, a class for each ScaleType. Minimums may be null. `put` returns whether the type holds
// the scale and minimum exactly.
struct ShortScales {
    f16* scales;
    bool put(const Place& at, const GroupScale& group) const {
        scales[at.index] = {to_f16(group.scale())};
        return widen(scales[at.index]) == group.scale();
    }
};

struct PowerScales {
    uint8_t* scales;
    bool put(const Place& at, const GroupScale& group) const {
        uint32_t bits;
        float scale = group.scale();
        std::memcpy(&bits, &scale, 4);
        scales[at.index] = uint8_t(bits >> 23);
        return (bits & 0x807fffff) == 0;
    }
};

struct WideScales {
    float *scales, *minimums;
    bool put(const Place& at, const GroupScale& group) const {
        scales[at.index] = group.scale();
        if (minimums) minimums[at.index] = group.offset();
        return true;
    }
};

// Tables of two levels (gemm_int.cpp). All groups of LEVEL_K numbers must have the same scale of 16 bits.
struct LevelScales {
    char *scales, *minimums;
    int groups;  // of LEVEL_K numbers
    bool put(const Place& at, const GroupScale& group) const {
        bool held = put_level(scales, at, group.super, group.number);
        return (!minimums || put_level(minimums, at, group.least, group.minimum)) && held;
    }
    bool put_level(char* table, const Place& at, float super, float number) const {
        size_t numbers = size_t(groups) * PANEL, bytes = numbers + PANEL * sizeof(f16);
        char* level = table + at.index / numbers * bytes;
        f16& stored = reinterpret_cast<f16*>(level)[at.column];
        if (at.group % groups == 0) stored = {to_f16(super)};
        level[PANEL * sizeof(f16) + at.index % numbers] = char(int8_t(number));
        return widen(stored) == super && float(int8_t(number)) == number;
    }
};

// Convert a row's numbers to the bits of the weight: symmetric integers are shifted to its middle, and
// indices of a table are replaced by the table's numbers if the weight has no table.
void widen_numbers(const Linear& linear, const BlockFormat& format, uint8_t* numbers) {
    int bits = format.bits, shift = 0;
    if (format.table && !linear.table) {
        for (int i = 0; i < linear.k; i++) numbers[i] = uint8_t(format.table[numbers[i]] + 128);
        bits = 8;
    }
    if (format.symmetric && bits < linear.bits) shift = (1 << (linear.bits - 1)) - (1 << (bits - 1));
    for (int i = 0; shift && i < linear.k; i++) numbers[i] = uint8_t(numbers[i] + shift);
}

// A thread's memory for a row: a byte for each number, and tables.
struct RowMemory {
    uint8_t* numbers;
    GroupTables tables;
};

constexpr size_t SMALLEST_GROUP = 16;

RowMemory row_memory(char* memory, size_t numbers) {
    float* floats = reinterpret_cast<float*>(memory);
    size_t groups = numbers / SMALLEST_GROUP;
    return {reinterpret_cast<uint8_t*>(floats + 4 * groups),
            {floats, floats + groups, floats + 2 * groups, floats + 3 * groups}};
}

size_t row_memory_bytes(size_t numbers) { return numbers + 4 * numbers / SMALLEST_GROUP * sizeof(float); }

// Return the scale and minimum of a row's group `g` in a format.
GroupScale group_scale(const BlockFormat& format, const GroupTables& row, int g) {
    if (!format.levels) return {row.scales[g], 1.0f, row.minimums[g], 1.0f};
    int super = g / (LEVEL_K / format.group);
    return {row.supers[super], row.scales[g], row.least[super], row.minimums[g]};
}

// Store the scales and minimums of column `i` of a panel for each group of the weight. The panel's tables
// begin at index `first`.
template <class Scales>
PackResult put_tables(const Linear& linear, const BlockFormat& format, const GroupTables& row, size_t first, int i,
                      const Scales& scales) {
    int groups = ceil_div(linear.k_padded, linear.group), parts = format.group / linear.group;
    float largest = float(1 << (format.table ? 8 : format.bits)), check = 0.0f;
    float zero = -float(1 << (linear.bits - 1));
    bool held = true;
    for (int g = 0; g < groups; g++) {
        GroupScale group{};
        if (g * linear.group < linear.k) group = group_scale(format, row, g / parts);
        if (format.symmetric) group.least = group.super * zero, group.minimum = group.number;
        held = scales.put({first + size_t(g * PANEL + i), g, i}, group) && held;
        check += group.scale() * largest * 0.0f + group.offset() * 0.0f;
    }
    return check != check ? PackResult::NOT_FINITE : held ? PackResult::PACKED : PackResult::NOT_HELD;
}

template <class Scales>
PackResult pack_block_panel(const Linear& linear, const BlockRows& from, int panel, char* memory, void* to,
                            const Scales& scales) {
    size_t row = row_bytes(linear), stride = column_stride(linear), padded = size_t(linear.k_padded);
    RowMemory own = row_memory(memory, padded);
    uint8_t* columns = own.numbers + padded;
    int groups = ceil_div(linear.k_padded, linear.group);
    size_t first = size_t(panel) * size_t(groups) * PANEL;
    PackResult result = PackResult::PACKED;
    std::memset(own.numbers + linear.k, 0, padded - size_t(linear.k));
    for (int i = 0; i < PANEL; i++) {
        const uint8_t* blocks = from.rows[panel * PANEL + i];
        if (!blocks) {
            std::memset(columns + size_t(i) * stride, 0, row);
            for (int g = 0; g < groups; g++) scales.put({first + size_t(g * PANEL + i), g, i}, {});
            continue;
        }
        const BlockFormat& format = *block_format(from.types[panel * PANEL + i]);
        format.unpack(blocks, linear.k, own.numbers, own.tables);
        widen_numbers(linear, format, own.numbers);
        PackResult tables = put_tables(linear, format, own.tables, first, i, scales);
        if (result != PackResult::NOT_FINITE && tables != PackResult::PACKED) result = tables;
        if (linear.bits == 4) {
            join_halves(linear, own.numbers, columns + size_t(i) * stride);
        } else {
            std::memcpy(columns + size_t(i) * stride, own.numbers, row);
        }
    }
    place_columns(linear, panel, columns, to);
    return result;
}

template <class Scales>
PackResult pack_block_panels(Pool& pool, const Linear& linear, const BlockRows& from, void* to, const Scales& scales) {
    size_t bytes = PANEL * column_stride(linear) + row_memory_bytes(size_t(linear.k_padded));
    std::atomic<bool> held{true};
    bool finite = for_panels(pool, linear, [&](int thread, int panel) {
        PackResult packed = pack_block_panel(linear, from, panel, pool.scratch(thread, bytes), to, scales);
        if (packed == PackResult::NOT_HELD) held = false;
        return packed != PackResult::NOT_FINITE;
    });
    return !finite ? PackResult::NOT_FINITE : held ? PackResult::PACKED : PackResult::NOT_HELD;
}

bool finite(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x7f800000) != 0x7f800000;
}
bool finite(bf16 x) { return (x.bits & 0x7f80) != 0x7f80; }

// Write the numbers of a group as floats: scale · value(number) + least. Return whether all are finite.
template <class T, class Value>
bool put_floats(const uint8_t* __restrict numbers, int count, float scale, float least, T* __restrict to,
                Value&& value) {
    bool all = true;
    for (int i = 0; i < count; i++) put(to[i], scale * value(numbers[i]) + least);
    for (int i = 0; i < count; i++) all &= finite(to[i]);
    return all;
}

template <class T>
bool row_to_floats(const BlockFormat& format, const RowMemory& row, int k, T* to) {
    float largest = float(1 << (format.table ? 8 : format.bits));
    int middle = format.symmetric ? 1 << (format.bits - 1) : 0, group = format.group;
    bool all = true;
    for (int g = 0; g < k / group; g++) {
        const uint8_t* numbers = row.numbers + size_t(g) * size_t(group);
        T* out = to + size_t(g) * size_t(group);
        GroupScale in_row = group_scale(format, row.tables, g);
        float scale = in_row.scale(), least = format.symmetric ? -0.0f : in_row.offset();  // x + -0 is x, also -0
        auto listed = [&](uint8_t number) { return float(format.table[number]); };
        auto counted = [&](uint8_t number) { return float(int(number) - middle); };
        bool good = format.table ? put_floats(numbers, group, scale, least, out, listed)
                                 : put_floats(numbers, group, scale, least, out, counted);
        all &= good && finite(scale * largest);
    }
    return all;
}

}  // namespace

PackResult pack_blocks(Pool& pool, const Linear& linear, const BlockRows& from, void* to, void* scales,
                       void* minimums) {
    auto with = [&](auto kind) { return pack_block_panels(pool, linear, from, to, kind); };
    switch (linear.scale_type) {
        case SCALE_F16: return with(ShortScales{static_cast<f16*>(scales)});
        case SCALE_E8M0: return with(PowerScales{static_cast<uint8_t*>(scales)});
        case SCALE_LEVELS:
            return with(LevelScales{static_cast<char*>(scales), static_cast<char*>(minimums), LEVEL_K / linear.group});
        default: return with(WideScales{static_cast<float*>(scales), static_cast<float*>(minimums)});
    }
}

bool unpack_floats(Pool& pool, const BlockRows& from, int count, int k, int type, void* to) {
    std::atomic<bool> all{true};
    pool.run([&](int thread) {
        FlushTiny exact(false);
        RowMemory row = row_memory(pool.scratch(thread, row_memory_bytes(size_t(k))), size_t(k));
        for (int i; (i = pool.claim()) < count;) {
            const BlockFormat& format = *block_format(from.types[i]);
            format.unpack(from.rows[i], k, row.numbers, row.tables);
            size_t at = size_t(i) * size_t(k);
            bool good = type == BF16 ? row_to_floats(format, row, k, static_cast<bf16*>(to) + at)
                                     : row_to_floats(format, row, k, static_cast<float*>(to) + at);
            if (!good) all = false;
        }
    });
    return all;
}

}  // namespace streamserve
