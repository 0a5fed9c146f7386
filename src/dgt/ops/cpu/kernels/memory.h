// Working memory: one allocation per call, divided into pieces. Nothing is allocated while the kernels run.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace dgt {

template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}

template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Ask for huge pages if fresh memory is large. The system hands it out page by page on first touch, which costs more
// than the computation on it; huge pages mean 500 times fewer page faults and fewer TLB misses.
inline void expect_huge_pages(void* memory, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr int64_t HUGE_PAGE = (int64_t)2 << 20;
    int64_t first = round_up((int64_t)(intptr_t)memory, HUGE_PAGE);
    int64_t end = ((int64_t)(intptr_t)memory + (int64_t)size) / HUGE_PAGE * HUGE_PAGE;
    if (first < end) madvise((void*)(intptr_t)first, (size_t)(end - first), MADV_HUGEPAGE);  // best effort: may fail
#else
    (void)memory;
    (void)size;
#endif
}

// Hands out consecutive pieces of a block. Without a block it only adds up their sizes: the code that lays out memory
// also measures it, so the two cannot disagree.
class Arena {
public:
    Arena() = default;
    Arena(char* block, size_t size) : block_(block), size_(size) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = (T*)(block_ + used_);
        size_t taken = (size_t)round_up(count * (int64_t)sizeof(T), ALIGNMENT);
        used_ += taken + ALIGNMENT;
        if (!block_) return nullptr;
        if (used_ > size_) abort();                                  // the layout was measured with other sizes: a bug
        ASAN_POISON_MEMORY_REGION((char*)piece + taken, ALIGNMENT);  // the address sanitizer reports overruns
        return piece;
    }

    size_t used() const { return used_; }

    static constexpr int64_t ALIGNMENT = 64;

private:
    char* block_ = nullptr;
    size_t size_ = 0;
    size_t used_ = 0;
};

// The bytes that a structure of working memory needs for a problem.
template <class Buffers, class Problem>
size_t bytes_of(const Problem& problem) {
    Arena measure;
    Buffers buffers(measure, problem);
    return measure.used();
}

// The memory of a call. A block of moderate size is kept for the next call, because getting fresh pages from the system
// one by one can take longer than the kernel itself.
class Block {
public:
    explicit Block(size_t size) : memory_(take_kept()) {
        size_t needed = size + Arena::ALIGNMENT;
        if (memory_ && memory_->size >= needed) return;
        free(memory_);
        memory_ = (Memory*)malloc(sizeof(Memory) + needed);
        if (!memory_) return;
        memory_->size = needed;
        expect_huge_pages(memory_, sizeof(Memory) + needed);
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() {
        if (!memory_) return;
        ASAN_UNPOISON_MEMORY_REGION(memory_ + 1, memory_->size);
        if (memory_->size <= MOST_KEPT) memory_ = __atomic_exchange_n(&kept_, memory_, __ATOMIC_ACQ_REL);
        free(memory_);
    }

    bool failed() const { return memory_ == nullptr; }
    char* aligned() const { return (char*)round_up((int64_t)(intptr_t)(memory_ + 1), Arena::ALIGNMENT); }

private:
    struct Memory {
        size_t size;  // of the memory after this header
    };

    static constexpr size_t MOST_KEPT = (size_t)32 << 20;

    static Memory* take_kept() { return __atomic_exchange_n(&kept_, (Memory*)nullptr, __ATOMIC_ACQ_REL); }

    static inline Memory* kept_ = nullptr;  // null while a call uses it
    Memory* memory_;
};

// A counter shared by threads.
class Counter {
public:
    int64_t add(int64_t x) { return __atomic_fetch_add(&value_, x, __ATOMIC_ACQ_REL); }
    void set(int64_t x) { __atomic_store_n(&value_, x, __ATOMIC_RELEASE); }
    int64_t get() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }

private:
    int64_t value_ = 0;
};

}  // namespace dgt
