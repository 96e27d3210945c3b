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

// Memory aligned to pages that only grows. New memory is zero.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Return at least `bytes` of memory. Its contents are preserved, or zero if it had to grow. If the system
    // refuses the memory, the process ends with a message.
    char* get(size_t bytes);

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

class Pool {
  public:
    // Start threads - 1 workers: the calling thread is the first of `threads`. `cpus`: the processor to pin each
    // worker to, or null. Throws std::system_error if the system refuses a thread, after all others have ended.
    Pool(int threads, const int32_t* cpus);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Call job(thread) on every thread, and return when all calls have. `alone`: the caller does the job by
    // itself, which is faster for a job that takes less time than waking the others.
    template <class Job>
    void run(Job&& job, bool alone = false) {
        start([](void* context, int thread) { (*static_cast<std::remove_reference_t<Job>*>(context))(thread); },
              &job, alone ? 1 : threads_);
    }

    // Inside a job: wait for all threads. Then all threads are in series 0, and the claims of all series
    // start at 0 again.
    void barrier();

    // Inside a job: claim the next unit of work of the calling thread's series, and return its number. The
    // job checks whether the unit exists.
    int claim() { return next_[size_t(series_)].fetch_add(1, std::memory_order_relaxed); }

    // Inside a job: move the calling thread to another series of units. Independent work, such as products
    // with different weights, needs no barrier in between if each product has a separate series.
    void enter_series(int number) { series_ = number; }

    // Make at least `count` series available. Must be called outside of jobs.
    void reserve_series(int count);

    // Memory of one thread, preserved between jobs.
    char* scratch(int thread, size_t bytes) { return scratch_[size_t(thread)].get(bytes); }

    // Memory shared by all threads, preserved between jobs. Must be requested outside of jobs.
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
    int threads_, active_;  // active: the number of threads that carry out this job
    std::vector<std::thread> workers_;
    std::vector<Buffer> scratch_;
    Buffer shared_[SHARED];
    Call call_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    // Each counter has a separate cache line: one thread writes it while others read the next counter.
    alignas(64) std::atomic<uint32_t> jobs_{0};
    alignas(64) std::atomic<uint32_t> passed_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    int series_count_ = 1;
    std::unique_ptr<std::atomic<int>[]> next_{new std::atomic<int>[1]{}};
};

}  // namespace streamserve
