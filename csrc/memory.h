// Working memory of a thread's calls. Kept between them: fresh pages cost more than the arithmetic of short calls.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace gsa {

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
