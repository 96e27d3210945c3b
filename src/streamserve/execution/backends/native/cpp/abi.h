// Structures and enums that Python mirrors, described as data: abi.cpp gives them to Python, which compares them with its
// own when it loads the library (abi.py). Each is described next to its definition, with all of its fields or values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace streamserve {

struct AbiField {
    const char* name;
    size_t offset, size;
};

struct AbiStruct {
    const char* name;
    size_t size;
    std::vector<AbiField> fields;
};

struct AbiValue {
    const char* name;
    int64_t value;
};

struct AbiEnum {
    const char* name;
    std::vector<AbiValue> values;
};

#define ABI_STRUCT(NAME, ...)                              \
    inline AbiStruct abi_of(const NAME*) {                 \
        using Described = NAME;                            \
        return {#NAME, sizeof(Described), {__VA_ARGS__}};  \
    }
#define ABI_FIELD(NAME) AbiField{#NAME, offsetof(Described, NAME), sizeof(Described::NAME)}

#define ABI_ENUM(NAME, ...)                \
    inline AbiEnum abi_of(const NAME*) {   \
        using Described = NAME;            \
        return {#NAME, {__VA_ARGS__}};     \
    }
#define ABI_VALUE(NAME) AbiValue{#NAME, int64_t(Described::NAME)}

}  // namespace streamserve
