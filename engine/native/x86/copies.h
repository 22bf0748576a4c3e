// Copies of memory that is not read soon.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace quire {

// Copies bytes that are not read soon. Stores through the caches would first read the target: 50 % more traffic.
inline void copy_past_the_caches(char* target, const char* source, int64_t bytes) {
#ifdef __AVX512F__
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 63);
  std::memcpy(target, source, head);
  int64_t done = head;
  for (; done + 64 <= bytes; done += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
  }
  std::memcpy(target + done, source + done, bytes - done);
  _mm_sfence();  // before another thread learns that the copy is done
#else
  std::memcpy(target, source, bytes);
#endif
}

}  // namespace quire
