// Memory of calls: numbers that live as long as a call, and a thread's working memory. That is kept between calls,
// since fresh pages cost more than the arithmetic of short ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace gsa {

// Whole numbers, zero at first, for as long as a call takes. A std::vector would end the process where there is no
// memory; this one is `missing`.
class Numbers {
   public:
    explicit Numbers(int64_t count)
        : data_(static_cast<int64_t*>(std::calloc(static_cast<size_t>(count) + 1, sizeof(int64_t)))) {}
    ~Numbers() { std::free(data_); }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;

    bool missing() const { return data_ == nullptr; }
    int64_t* data() { return data_; }
    int64_t& operator[](int64_t i) { return data_[i]; }

   private:
    int64_t* data_;
};

class WorkingMemory {
   public:
    ~WorkingMemory() { std::free(data_); }

    // So many bytes, of anything, from a multiple of 4096 on; null if there are none to be had.
    char* get(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + kPage - 1) / kPage * kPage;
            data_ = static_cast<char*>(std::aligned_alloc(kPage, size_));
            if (data_ == nullptr) size_ = 0;
        }
        return data_;
    }

    // Gives back what is more than a thread may hold on to.
    void trim() {
        if (size_ <= kKept) return;
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

   private:
    static constexpr size_t kPage = 4096, kKept = 64u << 20;
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace gsa
