// A thread pool that runs one job at a time, together with the calling thread.
//
//   caller   run(job) ── part 0 ──┬─ barrier ─┬─ part 0 ──┬─ return
//   worker   … waits ─── part 1 ──┘           └─ part 1 ──┘ waits …
//
// Work is claimed in units of outputs, never of a sum's terms, so results do not depend on the pool's size.
// A waiting thread spins for some microseconds and then sleeps, so that other processes can use the cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

namespace streamserve {

// Zeroed memory aligned to pages, which only grows.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // At least `bytes` of memory. Contents survive unless it grows, then they are zero. If the system refuses
    // the memory, the process ends with a message.
    char* get(size_t bytes);

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

class Pool {
  public:
    // `threads` of them, the caller's included. `cpus` (or null): where to pin the workers, one each. Throws
    // std::system_error if the system refuses one; the others have ended then.
    Pool(int threads, const int32_t* cpus);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Every thread calls job(thread); returns when all have. A job that is done before others could be woken
    // is better left to the caller `alone`.
    template <class Job>
    void run(Job&& job, bool alone = false) {
        start([](void* context, int thread) { (*static_cast<std::remove_reference_t<Job>*>(context))(thread); },
              &job, alone ? 1 : threads_);
    }

    // Inside a job: wait for all threads. All are in series 0 after it, and the claims of all series start at 0.
    void barrier();

    // Inside a job: the next unclaimed unit of work of the series that the calling thread is in. The job checks
    // for the end.
    int claim() { return next_[size_t(series_)].fetch_add(1, std::memory_order_relaxed); }

    // Inside a job: the calling thread goes on to another series of units. Work that is independent of each
    // other, such as products with different weights, needs no barrier between if each has its own series.
    void enter_series(int number) { series_ = number; }

    // At least so many series. Request them outside of jobs.
    void reserve_series(int count);

    // Memory of one thread, kept between jobs.
    char* scratch(int thread, size_t bytes) { return scratch_[size_t(thread)].get(bytes); }

    // Memory shared by all, kept between jobs. Request it outside of jobs.
    char* shared(int which, size_t bytes) { return shared_[which].get(bytes); }

  private:
    using Call = void (*)(void*, int);
    static constexpr int SHARED = 16;

    void start(Call call, void* context, int active);
    void work(int thread);
    void stop();
    void wait_while(std::atomic<uint32_t>& word, uint32_t value);
    void announce(std::atomic<uint32_t>& word);
    void restart_claims();

    inline static thread_local int series_ = 0;
    int threads_, active_;  // active: those that carry out this job
    std::vector<std::thread> workers_;
    std::vector<Buffer> scratch_;
    Buffer shared_[SHARED];
    Call call_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    // Each on a separate cache line: threads write them while others read their neighbours.
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<uint32_t> passed_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    int series_count_ = 1;
    std::unique_ptr<std::atomic<int>[]> next_{new std::atomic<int>[1]{}};
};

}  // namespace streamserve
