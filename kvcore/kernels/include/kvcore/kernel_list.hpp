/* The kernels that a library launches, noted by the launches themselves. Host code only. */
#ifndef KVCORE_KERNEL_LIST_HPP
#define KVCORE_KERNEL_LIST_HPP

#include <cxxabi.h>
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <typeinfo>

namespace kvcore {

/* Name of a kernel -> its struct. Run-time compilers make the one from the other. */
inline std::map<std::string, std::string> &listed_kernels() {
    static auto *kernels = new std::map<std::string, std::string>;
    return *kernels;
}

/* Mentioning `is_listed` of a kernel, wherever it may be launched, lists it before anything runs. */
template <class K> struct Listed {
    static bool list() {
        char *type = abi::__cxa_demangle(typeid(K).name(), nullptr, nullptr, nullptr);
        const auto [at, is_new] = listed_kernels().emplace(K::name, type == nullptr ? "" : type);
        if (!is_new) {
            fprintf(stderr, "kvcore: two kernels are named %s: %s and %s\n", K::name, at->second.c_str(), type);
            abort();
        }
        free(type);
        return true;
    }
    static inline const bool is_listed = list();
};

/* Lines "name<TAB>type". */
inline const char *kernel_list() {
    static const std::string *text = [] {
        auto *made = new std::string;
        for (const auto &[name, type] : listed_kernels()) *made += name + '\t' + type + '\n';
        return made;
    }();
    return text->c_str();
}

}  // namespace kvcore

#endif
