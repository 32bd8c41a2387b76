/* Streams of the emulated device: what is queued runs late, when somebody waits for it, and those of different streams
 * take turns in an order drawn from a seed. So whoever forgets to wait sees it.
 *
 * Events are a stream and the number of its last command. A command waits for events of commands that were queued before
 * it, so there is always one that can run.
 */
#ifndef KVCORE_EMU_STREAMS_HPP
#define KVCORE_EMU_STREAMS_HPP

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <kvcore/queue_cpu.hpp>

#include "memory.hpp"

namespace kvcore_emu {

struct Stream;

struct Command {
    std::function<void()> run;
    std::shared_ptr<Stream> other; /* runs when `until` commands of this stream are done; null: at once */
    uint64_t until;
};

struct Stream : std::enable_shared_from_this<Stream> {
    std::deque<Command> waiting;
    uint64_t queued = 0, done = 0;
    uint64_t status[2] = {KV_OK, KV_OK}; /* of the ops since the last check; memory that kernels reach, as any is */
    std::deque<std::pair<uint64_t, void *>> owned; /* memory that is freed when so many commands are done */

    bool can_run() const {
        return !waiting.empty() && (!waiting.front().other || waiting.front().other->done >= waiting.front().until);
    }
};

class Device {
  public:
    /* Never destroyed: Python may still let go of arrays when the process ends. */
    static Device &one() {
        static Device *device = new Device;
        return *device;
    }

    std::mutex lock; /* guards all that follows, and is held while kernels run */
    Memory memory;

    void seed(uint64_t seed) {
        seed_ = seed;
        drawn_ = 0;
    }

    std::shared_ptr<Stream> make_stream() {
        streams_.push_back(std::make_shared<Stream>());
        return streams_.back();
    }

    void remove_stream(Stream *stream) {
        synchronize(stream);
        streams_.erase(std::remove(streams_.begin(), streams_.end(), stream->shared_from_this()), streams_.end());
    }

    void push(Stream *stream, std::function<void()> run, std::shared_ptr<Stream> other = nullptr, uint64_t until = 0) {
        stream->waiting.push_back({std::move(run), std::move(other), until});
        stream->queued++;
    }

    /* Drops the last few commands, of an op that failed. */
    void take_back(Stream *stream, int count) {
        for (; count > 0; count--, stream->queued--) stream->waiting.pop_back();
        auto is_dropped = [=](const Reading &r) { return r.stream.get() == stream && r.number > stream->queued; };
        readings_.erase(std::remove_if(readings_.begin(), readings_.end(), is_dropped), readings_.end());
    }

    /* Runs until what is queued on a stream now is done: with seed 0 only that and what it waits for. */
    void synchronize(Stream *stream) {
        for (const uint64_t until = stream->queued; stream->done < until;) {
            Stream *next = seed_ == 0 ? first_needed(stream) : any();
            run_one(next);
        }
    }

    /* Now and then, runs a few commands though nobody waits. */
    void maybe_run_some() {
        if (seed_ == 0 || draw() % 4 != 0) return;
        for (uint64_t n = draw() % 8; n > 0; n--) {
            Stream *next = any();
            if (next == nullptr) return;
            run_one(next);
        }
    }

    /* A copy out of host memory that is still to come. */
    void will_read(Stream *stream, const char *from, int64_t bytes) {
        forget_done();
        readings_.push_back({stream->shared_from_this(), stream->queued + 1, from, from + bytes});
    }

    bool is_to_be_read(const char *from, int64_t bytes) {
        forget_done();
        return std::any_of(readings_.begin(), readings_.end(),
                           [=](const Reading &r) { return from < r.end && r.begin < from + bytes; });
    }

  private:
    struct Reading {
        std::shared_ptr<Stream> stream;
        uint64_t number; /* of the command */
        const char *begin, *end;
    };

    void forget_done() {
        auto is_done = [](const Reading &r) { return r.stream->done >= r.number; };
        readings_.erase(std::remove_if(readings_.begin(), readings_.end(), is_done), readings_.end());
    }

    uint64_t draw() { return kvcore::mix(seed_ + kvcore::GOLDEN * ++drawn_); }

    static Stream *first_needed(Stream *stream) {
        while (!stream->can_run()) stream = stream->waiting.front().other.get();
        return stream;
    }

    /* One of the streams that can run; null if none can. */
    Stream *any() {
        std::vector<Stream *> ready;
        for (const auto &stream : streams_)
            if (stream->can_run()) ready.push_back(stream.get());
        return ready.empty() ? nullptr : ready[draw() % ready.size()];
    }

    /* What is thrown here ends the process: the queue would have lost a command. */
    void run_one(Stream *stream) noexcept {
        Command command = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        kvcore::cpu_seed.store(seed_ == 0 ? 0 : draw() | 1);
        if (command.run) command.run();
        stream->done++;
        for (; !stream->owned.empty() && stream->owned.front().first <= stream->done; stream->owned.pop_front())
            free(stream->owned.front().second);
    }

    uint64_t seed_ = 1, drawn_ = 0;
    std::vector<std::shared_ptr<Stream>> streams_;
    std::vector<Reading> readings_;
};

}  // namespace kvcore_emu

#endif
