// Structures, enums and functions that Python mirrors, described as data: abi.cpp gives them to Python, which compares
// them with its own when it loads the library (abi.py). Each is described next to its definition, a structure with all of
// its fields, an enum with all of its values, and a function with the types of its result and arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
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

struct AbiFunction {
    const char* name;
    std::string types;
};

// The type of a result or an argument: a pointer, or a signed, unsigned or floating-point number with its bytes.
template <class T>
std::string abi_type() {
    if constexpr (std::is_void_v<T>) {
        return "void";
    } else if constexpr (std::is_pointer_v<T>) {
        return "pointer";
    } else {
        static_assert(std::is_arithmetic_v<T>, "Python passes numbers and pointers");
        const char* kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
        return kind + std::to_string(8 * sizeof(T));
    }
}

template <class Result, class... Arguments>
std::string abi_types(Result (*)(Arguments...) noexcept) {
    std::string arguments;
    ((arguments += (arguments.empty() ? "" : ", ") + abi_type<Arguments>()), ...);
    return abi_type<Result>() + " (" + arguments + ")";
}

// All functions that Python calls (api.cpp).
std::vector<AbiFunction> abi_functions();

#define ABI_FUNCTION(NAME) AbiFunction{#NAME, abi_types(NAME)}

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
