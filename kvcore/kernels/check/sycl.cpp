// Every kernel of every op, through Intel's run-time compiler: sycl INCLUDE_FOLDER SUB_GROUP_SIZE. Needs no GPU: it
// builds for whatever device there is, the CPU's as well.
#include <cxxabi.h>
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <typeinfo>

#include <sycl/sycl.hpp>

#include <kvcore/entry_points.hpp>

#include "compile_queue.hpp"

namespace {

std::map<std::string, std::string> &kernels() {
    static std::map<std::string, std::string> found;  // name of the kernel -> its struct
    return found;
}

template <class K> struct Named {
    static bool remember() {
        char *type = abi::__cxa_demangle(typeid(K).name(), nullptr, nullptr, nullptr);
        const bool is_new = kernels().emplace(K::name, type).second;
        if (!is_new) fprintf(stderr, "two kernels are named %s\n", K::name);
        free(type);
        return is_new;
    }
    static inline const bool is_new = remember();
};

struct Sycl {
    template <class K> static void use() { (void)&Named<K>::is_new; }
};
using Queue = CompileQueue<32, Sycl>;

}  // namespace

KVCORE_ENTRY_POINTS(Queue)

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    std::string text = "#include <sycl/sycl.hpp>\n#include <kvcore/ctx_sycl.hpp>\n#include <kvcore/kernels.hpp>\n";
    for (const auto &[name, type] : kernels()) text += "KVCORE_SYCL_KERNEL(" + type + ", " + name + ")\n";

    namespace x = sycl::ext::oneapi::experimental;
    std::string log;
    try {
        sycl::queue queue;
        auto source = x::create_kernel_bundle_from_source(queue.get_context(), x::source_language::sycl, text);
        auto built = x::build(source, x::properties{x::build_options{std::vector<std::string>{
                                          std::string("-I") + argv[1], std::string("-DKVCORE_WARP_WIDTH=") + argv[2],
                                          "-DKVCORE_DEVICE_ONLY", "-ffp-contract=off"}},
                                      x::save_log{&log}});
        for (const auto &[name, type] : kernels()) {
            built.ext_oneapi_get_kernel(name);
            printf("%s\n", type.c_str());
        }
    } catch (const std::exception &error) {
        fprintf(stderr, "%s\n%s\n", error.what(), log.c_str());
        fflush(stderr);
        _Exit(1);
    }
    fflush(stdout);
    _Exit(0);  // the runtime does not survive the end of static objects
}
