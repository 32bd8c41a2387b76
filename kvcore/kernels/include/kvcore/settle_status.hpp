/* The last kernel of each op that reports. */
#ifndef KVCORE_SETTLE_STATUS_HPP
#define KVCORE_SETTLE_STATUS_HPP

#include "context.hpp"

namespace kvcore {

/* Ends an op that reports: its findings become those of the stream, unless an earlier op left some. */
struct SettleStatus {
    struct Args {
        uint64_t *status; /* [2]: see abi.h */
    };
    static constexpr const char *name = "settle_status";
    static constexpr bool flat = true;

    template <class C> KVCORE_DEVICE static void body(const C &ctx, const Args &a) {
        if (ctx.block() != 0 || ctx.thread() != 0) return;
        if (a.status[1] == KV_OK) a.status[1] = a.status[0];
        else a.status[0] = a.status[1];
    }
};

}  // namespace kvcore

#endif
