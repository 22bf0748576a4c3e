// Memory that is kept from step to step.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace quire {

// Memory of 64-byte lines that only grows.
template <typename T>
class Buffer {
 public:
  T* at_least(size_t count) {
    if (count > count_) {
      std::free(data_);
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
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
