// Parts of a piece of working memory. Kernels of every instruction set include it, so nothing of it may be a symbol.
#pragma once

#include <cstddef>

namespace gsa {
namespace {

// Working memory, handed out piece by piece; without memory it only counts.
struct Arena {
    char* base = nullptr;
    size_t used = 0;

    // Room for so many numbers, from a multiple of 64 bytes on.
    template <class T>
    T* take(size_t count) {
        const size_t offset = used;
        used += (count * sizeof(T) + 63) / 64 * 64;
        return base == nullptr ? nullptr : reinterpret_cast<T*>(base + offset);
    }
};

}  // namespace
}  // namespace gsa
