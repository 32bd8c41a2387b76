// Compiles an image's text with Intel's run-time compiler: sycl TEXT INCLUDE_FOLDER SUB_GROUP_SIZE KERNEL... Needs no
// GPU: it builds for whatever device there is, the CPU's as well.
#include <stdio.h>
#include <stdlib.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <sycl/sycl.hpp>

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    std::ifstream file(argv[1]);
    const std::string text{std::istreambuf_iterator<char>(file), {}};

    namespace x = sycl::ext::oneapi::experimental;
    std::string log;
    try {
        sycl::queue queue;
        auto source = x::create_kernel_bundle_from_source(queue.get_context(), x::source_language::sycl, text);
        auto built = x::build(source, x::properties{x::build_options{std::vector<std::string>{
                                          std::string("-I") + argv[2], std::string("-DKVCORE_WARP_WIDTH=") + argv[3],
                                          "-DKVCORE_DEVICE_ONLY", "-ffp-contract=off"}},
                                      x::save_log{&log}});
        for (int i = 4; i < argc; ++i) {
            built.ext_oneapi_get_kernel(argv[i]);
            puts(argv[i]);
        }
    } catch (const std::exception &error) {
        fprintf(stderr, "%s\n%s\n", error.what(), log.c_str());
        fflush(stderr);
        _Exit(1);
    }
    fflush(stdout);
    _Exit(0);  // the runtime does not survive the end of static objects
}
