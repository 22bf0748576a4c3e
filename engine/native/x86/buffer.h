// Memory that is kept from step to step.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace quire {

constexpr size_t kLargePage = 2 << 20;

// Requests large pages for untouched memory, because with small pages the CPU looks up a page for each K or V of a block.
// Falls back to small pages if the system has no large ones.
inline void prefer_large_pages(void* data, size_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (address + bytes) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Memory aligned to cache lines that only grows.
template <typename T>
class Buffer {
 public:
  T* at_least(size_t count) {
    if (count > count_) {
      std::free(data_);
      const size_t unit = count * sizeof(T) < kLargePage ? 64 : kLargePage;
      const size_t bytes = (count * sizeof(T) + unit - 1) / unit * unit;
      data_ = static_cast<T*>(std::aligned_alloc(unit, bytes));
      prefer_large_pages(data_, bytes);
      std::memset(static_cast<void*>(data_), 0, bytes);
      count_ = count;
    }
    return data_;
  }
  ~Buffer() { std::free(data_); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace quire
