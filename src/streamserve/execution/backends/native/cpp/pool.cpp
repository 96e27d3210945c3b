#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace streamserve {

namespace {

constexpr long SPIN_NANOSECONDS = 40'000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

long now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000L + time.tv_nsec;
}

void pin(std::thread& thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // if refused, the thread runs anywhere
}

// End the process: a job can neither go on without its memory nor stop, for its other threads wait in a barrier.
[[noreturn]] void end_without_memory(size_t bytes) {
    std::fprintf(stderr, "streamserve's kernels: the system refuses %zu bytes of memory\n", bytes);
    std::abort();
}

}  // namespace

char* Buffer::get(size_t bytes) {
    if (bytes > size_) {
        std::free(data_);
        size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
        if (!data_) end_without_memory(size_);
        madvise(data_, size_, MADV_HUGEPAGE);
        std::memset(data_, 0, size_);
    }
    return data_;
}

Pool::Pool(int threads, const int32_t* cpus) : threads_(threads), active_(threads), scratch_(size_t(threads)) {
    workers_.reserve(size_t(threads));
    try {
        for (int thread = 1; thread < threads; thread++) {
            workers_.emplace_back([this, thread] { work(thread); });
            if (cpus) pin(workers_.back(), cpus[thread - 1]);
        }
    } catch (...) {
        stop();  // destroying a std::thread that still runs would end the process
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    stopping_ = true;
    announce(jobs_);
    for (std::thread& worker : workers_) worker.join();
}

void Pool::reserve_series(int count) {
    if (count <= series_count_) return;
    next_.reset(new std::atomic<int>[size_t(count)]{});
    series_count_ = count;
}

void Pool::restart_claims() {
    for (int i = 0; i < series_count_; i++) next_[size_t(i)].store(0, std::memory_order_relaxed);
}

void Pool::start(Call call, void* context, int active) {
    call_ = call;
    context_ = context;
    active_ = active;
    restart_claims();
    if (active > 1) announce(jobs_);
    call(context, 0);
    barrier();
}

void Pool::work(int thread) {
    for (uint32_t seen = 0;; seen++) {
        wait_while(jobs_, seen);
        if (stopping_) return;
        call_(context_, thread);
        barrier();
    }
}

void Pool::barrier() {
    series_ = 0;
    if (active_ == 1) {
        restart_claims();
        return;
    }
    uint32_t before = passed_.load(std::memory_order_relaxed);
    int active = active_;  // read it before arriving: the next job may change it as soon as all have arrived
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < active) {
        wait_while(passed_, before);
        return;
    }
    arrived_.store(0, std::memory_order_relaxed);
    restart_claims();
    announce(passed_);
}

void Pool::wait_while(std::atomic<uint32_t>& word, uint32_t value) {
    long deadline = 0;
    for (int turn = 0; word.load(std::memory_order_acquire) == value; turn++) {
        pause();
        if (turn % 64 != 63) continue;
        long time = now();
        if (!deadline) deadline = time + SPIN_NANOSECONDS;
        if (time < deadline) continue;
        // `announce` changes the word, then reads the sleepers' count. This thread increments the count, then
        // reads the word. So at least one of the two sees the other, and no wake-up is lost.
        sleeping_.fetch_add(1);
        if (word.load() == value) {
            syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
        }
        sleeping_.fetch_sub(1);
    }
}

void Pool::announce(std::atomic<uint32_t>& word) {
    word.fetch_add(1);
    if (sleeping_.load()) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace streamserve
