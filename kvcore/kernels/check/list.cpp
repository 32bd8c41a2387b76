// Prints the ops that there are launchers of, a line each, and after an empty line the kernels that those launch, as
// libraries list them: lines "name<TAB>type".
#include <stdio.h>

#include <kvcore/entry_points.hpp>
#include <kvcore/kernel_list.hpp>

#include "compile_queue.hpp"

namespace {

struct List {
    template <class K> static void use() { (void)&kvcore::Listed<K>::is_listed; }
};
using Queue = CompileQueue<32, List>;

}  // namespace

KVCORE_ENTRY_POINTS(Queue)

#define PRINT(Queue, op, Args, reports) puts(#op);

int main() {
    KVCORE_EACH_OP(PRINT, Queue)
    puts("");
    return fputs(kvcore::kernel_list(), stdout) < 0;
}
