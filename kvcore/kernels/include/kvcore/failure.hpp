/* Why the last launch of this host thread did not take place. Host code only. */
#ifndef KVCORE_FAILURE_HPP
#define KVCORE_FAILURE_HPP

#include <stdio.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "abi.h"

namespace kvcore {

inline char (&last_error())[256] {
    static thread_local char text[256] = "";
    return text;
}

/* What a device's driver refused: a KV_FAIL_ code, and why. */
class DriverError : public std::runtime_error {
  public:
    DriverError(int32_t code, const std::string &why) : std::runtime_error(why), code(code) {}
    const int32_t code;
};

/* A queue's first failure. */
class Failure {
  public:
    int32_t fail(int32_t code, const char *why) {
        if (code_ == 0) {
            code_ = code;
            snprintf(last_error(), sizeof last_error(), "%s", why);
        }
        return code_;
    }
    int32_t failed() const { return code_; }

    /* The same for what was thrown; in a handler only. Nothing may leave through the C ABI. */
    int32_t fail_by_exception() {
        try {
            throw;
        } catch (const std::bad_alloc &) {
            return fail(KV_FAIL_MEMORY, "the host has no memory for what the launch needs");
        } catch (const DriverError &error) {
            return fail(error.code, error.what());
        } catch (const std::exception &error) {
            return fail(KV_FAIL_DEVICE, error.what());
        } catch (...) {
            return fail(KV_FAIL_DEVICE, "what was thrown is no std::exception");
        }
    }

  private:
    int32_t code_ = 0;
};

}  // namespace kvcore

#endif
