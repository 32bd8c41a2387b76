/* Stacks and the switch between them: what ctx_cpu.hpp runs the threads of a block on. Host code only.
 *
 * A switch saves the registers that a function call preserves, as in every coroutine library (the idea is as old as
 * M. Conway, "Design of a separable transition-diagram compiler", 1963); ucontext does the same on other machines than
 * x86-64, with two system calls each time. Address sanitizer is told of every switch.
 */
#ifndef KVCORE_FIBERS_HPP
#define KVCORE_FIBERS_HPP

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvcore {

#if defined(__x86_64__)
using Machine = void *; /* the stack pointer; the registers lie on the stack */

__attribute__((naked, noinline)) inline void switch_machine(Machine *, Machine *) {
    __asm__ volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq (%rsi), %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n");
}

inline void prepare_machine(Machine *machine, char *stack, size_t bytes, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack + bytes);
    *--top = nullptr;                           /* entry's return address: it never returns */
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    *machine = top;
}
#else
using Machine = ucontext_t;

inline void switch_machine(Machine *from, Machine *to) { swapcontext(from, to); }

inline void prepare_machine(Machine *machine, char *stack, size_t bytes, void (*entry)()) {
    getcontext(machine);
    machine->uc_stack.ss_sp = stack;
    machine->uc_stack.ss_size = bytes;
    machine->uc_link = nullptr;
    makecontext(machine, entry, 0);
}
#endif

/* Stacks of one host thread, used again by every block; a page without access below each ends an overflow. */
class Stacks {
  public:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t bytes = 256 << 10;
#else
    static constexpr size_t bytes = 64 << 10;
#endif

    Stacks() = default;
    Stacks(const Stacks &) = delete;
    Stacks &operator=(const Stacks &) = delete;
    ~Stacks() {
        for (char *stack : stacks_) munmap(stack - guard(), bytes + guard());
    }

    /* Returns whether there are `count` stacks; there is not always memory. */
    bool reserve(size_t count) {
        while (stacks_.size() < count) {
            void *at = mmap(nullptr, bytes + guard(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (at == MAP_FAILED) return false;
            mprotect(at, guard(), PROT_NONE);
            stacks_.push_back(static_cast<char *>(at) + guard());
        }
        return true;
    }

    char *operator[](size_t i) const { return stacks_[i]; }

  private:
    static size_t guard() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
    std::vector<char *> stacks_;
};

/* A stack with what runs on it, or (without `start`) the stack that the host thread came with. */
class Fiber {
  public:
    void start(char *stack, void (*entry)()) {
        stack_ = stack;
        size_ = Stacks::bytes;
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(stack, Stacks::bytes);
        fake_ = nullptr;
#endif
        prepare_machine(&machine_, stack, Stacks::bytes, entry);
    }

    /* Suspends this fiber, which must be the running one, and continues `next`. */
    void switch_to(Fiber &next) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&fake_, next.stack_, next.size_);
#endif
        switch_machine(&machine_, &next.machine_);
        arrived();
    }

    /* The same from a fiber that ends. */
    void leave_for(Fiber &next) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(nullptr, next.stack_, next.size_);
#endif
        switch_machine(&machine_, &next.machine_);
    }

    /* The first thing to call on a new stack; `from` is the fiber that switched here. */
    void entered(Fiber &from) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.size_);
#else
        (void)from;
#endif
    }

  private:
    void arrived() {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake_, nullptr, nullptr);
#endif
    }

    Machine machine_{};
    const void *stack_ = nullptr;
    size_t size_ = 0;
    void *fake_ = nullptr;
};

}  // namespace kvcore

#endif
