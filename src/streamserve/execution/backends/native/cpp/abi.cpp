// The description of what Python mirrors, as text: one line for a field, a value or a function.
#include "abi.h"

#include <string>

#include "attention.h"
#include "blocks.h"
#include "layers.h"
#include "lora.h"
#include "pack.h"
#include "sampling.h"

using namespace streamserve;

namespace {

template <class T>
auto of() {
    return abi_of(static_cast<const T*>(nullptr));
}

std::string line(const char* name, const char* entry, const std::string& value) {
    return std::string(name) + "\t" + entry + "\t" + value + "\n";
}

std::string describe() {
    const AbiStruct structs[] = {
        of<Linear>(), of<Span>(), of<CacheLayer>(), of<Scoring>(), of<Gating>(), of<Experts>(),
        of<Layer>(), of<Model>(), of<LowRankColumns>(), of<LowRank>(), of<Lora>(), of<Step>(),
        of<Cache>(), of<Draw>()
    };
    const AbiEnum enums[] = {
        of<Type>(), of<Source>(), of<BlockType>(), of<PackResult>(), of<Path>(), of<Numbers>(),
        of<ScaleType>(), of<Activation>(),
        {"constants",
         {{"PANEL", PANEL}, {"CHUNK", CHUNK}, {"LEVEL_K", LEVEL_K}, {"LORA_MAPS", LORA_MAPS},
          {"MAX_QUERIES", MAX_QUERIES}, {"NOT_FINITE", NOT_FINITE}}},
    };
    std::string text;
    for (const AbiStruct& own : structs) {
        for (const AbiField& field : own.fields) {
            text += line(own.name, field.name,
                         std::to_string(field.size) + " bytes at " + std::to_string(field.offset));
        }
        text += line(own.name, "size", std::to_string(own.size) + " bytes");
    }
    for (const AbiEnum& own : enums) {
        for (const AbiValue& each : own.values) text += line(own.name, each.name, std::to_string(each.value));
    }
    for (const AbiFunction& own : abi_functions()) text += line("functions", own.name, own.types);
    return text;
}

}  // namespace

extern "C" const char* ss_abi() noexcept {
    static const std::string text = describe();
    return text.c_str();
}
