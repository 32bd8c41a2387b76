// A launch queue that runs nothing: launchers instantiated with it name every kernel there is.
#pragma once

#include <kvcore/failure.hpp>

// Compiler::use<K>() is called where kernel K would be launched.
template <int Width, class Compiler> class CompileQueue : public kvcore::Failure {
  public:
    static constexpr int warp_width = Width;
    explicit CompileQueue(void *) {}
    template <class K> void launch(int64_t, int, int, const typename K::Args &) { Compiler::template use<K>(); }
    int64_t grid(int64_t items, int64_t) const { return items; }
    template <class T> const T *upload(const T *host, int64_t) { return host; }
    void *scratch(int64_t) { return nullptr; }
    void zero(void *, int64_t) {}
    template <class T> T *device(uint64_t) { return nullptr; }
    bool reaches(uint64_t address) const { return address != 0; }
    int64_t engine_bytes() const { return INT64_MAX; }
    void submit() {}
    void transfer(uint64_t, uint64_t, int64_t) {}
    void transfer(void *, uint64_t, int64_t) {}
    static void *keep(const void *, int64_t) { return nullptr; }
    static void release(void *) {}
};
