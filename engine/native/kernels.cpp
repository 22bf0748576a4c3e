// The CPU's kernels: paged attention that reads blocks in place, products with packed weights, and the whole step of a
// Llama-shaped decoder, so that a step costs one call from Python.
//
// bfloat16 products use AMX tiles where the CPU has them, AVX512-BF16 otherwise. Both read the same layouts: elements that
// are multiplied with each other lie in pairs, as their instructions want them.
//
//   weights   [n / 16][k / 32][16 pairs of k][16 n][2]    zero where n or k is padded
//   K         [kv head][slot / 16][head size / 2][16 slots][2]
//   V         [kv head][slot / 2][head size][2]
//
// Blocks of other types, or of sizes that are no multiple of 16, are slot-major: [kv head][slot][head size].

#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int kSlots = 16;        // slots of K that one row of a tile has
constexpr int kRows = 16;         // query rows of one attention tile
constexpr int kChunk = 64;        // slots between two corrections of the softmax
constexpr int kLeastSplit = 128;  // slots of one piece of a sequence at least
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Threads -------------------------------------------------------------------------------------------------------------

// Threads that work on one step together. They wait for each other many times in a step, so they spin a little; between
// steps they sleep.
class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { serve(id); });
  }
  ~Team() {
    stopping_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  void run(const std::function<void(int)>& work) {
    work_ = &work;
    running_.store(size_ - 1);
    generation_.fetch_add(1);
    generation_.notify_all();
    work(0);
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

  // All threads of `run` come here; none goes on before the last has come.
  void barrier() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

  // Takes items one by one, so that a thread that is held up by another process leaves its share to the others. Ends with
  // a barrier.
  template <typename Work>
  void each(int items, const Work& work) {
    for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) work(item);
    barrier();
  }

 private:
  template <typename Done>
  static void wait(const Done& done) {
    for (int spins = 0; !done(); ++spins) {
      if (spins < 2000) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  void serve(int id) {
    uint32_t seen = 0;
    while (true) {
      generation_.wait(seen);
      seen = generation_.load();
      if (stopping_) return;
      (*work_)(id);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> next_{0};
};

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

// Numbers -------------------------------------------------------------------------------------------------------------

inline float widened(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline bf16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float element(const float* p) { return *p; }
inline float element(const bf16* p) { return widened(*p); }
inline float element(const _Float16* p) { return static_cast<float>(*p); }
inline void put(float* p, float value) { *p = value; }
inline void put(bf16* p, float value) { *p = narrowed(value); }
inline void put(_Float16* p, float value) { *p = static_cast<_Float16>(value); }

#if defined(__AVX512F__)
// exp for arguments that are not positive: 2^i * p(f), a polynomial of degree 5 (Cephes' expf); 0 below -87.
inline __m512 exp_negative(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(f, f), _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(alive, p, whole);
}
#endif

// AMX -----------------------------------------------------------------------------------------------------------------

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define QUIRE_AMX 1
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define QUIRE_BF16 1
#endif

bool use_amx = false;

#ifdef QUIRE_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int row_count, int byte_count) {
    rows[tile] = static_cast<uint8_t>(row_count);
    bytes[tile] = static_cast<uint16_t>(byte_count);
  }
};

// Products: four sums, two pieces of A, two of B.
void configure_products() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  _tile_loadconfig(&config);
}

// Attention: four sums, Q and K in 4 and 5, weights and V, of 16 slots, in 6 and 7.
void configure_attention() {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, 16, 64);
  config.set(6, 16, 32);
  config.set(7, 8, 64);
  _tile_loadconfig(&config);
}

bool ask_for_tiles() {
  constexpr int kAskPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#endif

// Products ------------------------------------------------------------------------------------------------------------

struct Packed {
  const bf16* weights;
  int outputs;  // multiple of 16
  int inputs;   // multiple of 32
};

inline int padded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

#ifdef QUIRE_BF16
inline __m512bh pair(const bf16* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// Rows [0, count) of A times 16 columns of the weights, without tiles. `sums` is [count][16] apart by `stride` floats.
template <int count>
void product_rows(const bf16* a, int inputs, const bf16* weights, float* sums, int stride) {
  // Two sums for each row, since an addition takes longer than the load of its weights.
  __m512 even[count], odd[count];
  for (int row = 0; row < count; ++row) even[row] = odd[row] = _mm512_setzero_ps();
  for (int k = 0; k < inputs; k += 4) {
    const __m512bh first = (__m512bh)_mm512_load_si512(weights + static_cast<size_t>(k) * 16);
    const __m512bh second = (__m512bh)_mm512_load_si512(weights + static_cast<size_t>(k) * 16 + 32);
    for (int row = 0; row < count; ++row) {
      even[row] = _mm512_dpbf16_ps(even[row], first, pair(a + static_cast<size_t>(row) * inputs + k));
      odd[row] = _mm512_dpbf16_ps(odd[row], second, pair(a + static_cast<size_t>(row) * inputs + k + 2));
    }
  }
  for (int row = 0; row < count; ++row) _mm512_storeu_ps(sums + row * stride, _mm512_add_ps(even[row], odd[row]));
}

void product_vectors(const bf16* a, int rows, int inputs, const bf16* weights, float* sums, int stride) {
  int row = 0;
  for (; row + 8 <= rows; row += 8) {
    product_rows<8>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
  for (; row + 4 <= rows; row += 4) {
    product_rows<4>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
  for (; row < rows; ++row) {
    product_rows<1>(a + static_cast<size_t>(row) * inputs, inputs, weights, sums + row * stride, stride);
  }
}
#endif

#ifdef QUIRE_AMX
// 16 rows of A times up to 64 columns: the weights are read once, and no faster than memory gives them.
void product_tiles_16(const bf16* a, int inputs, const bf16* weights, int blocks, float* sums, int stride) {
  const int steps = inputs / 32;
  const size_t column = static_cast<size_t>(inputs) * 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const bf16* w = weights + static_cast<size_t>(step) * 512;
    _tile_loadd(4, a + step * 32, inputs * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (blocks > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (blocks > 2) {
      _tile_loadd(6, w + 2 * column, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (blocks > 3) {
      _tile_loadd(7, w + 3 * column, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, stride * 4);
  if (blocks > 1) _tile_stored(1, sums + 16, stride * 4);
  if (blocks > 2) _tile_stored(2, sums + 32, stride * 4);
  if (blocks > 3) _tile_stored(3, sums + 48, stride * 4);
}

// 32 rows of A times up to 32 columns.
void product_tiles_32(const bf16* a, int inputs, const bf16* weights, int blocks, float* sums, int stride) {
  const int steps = inputs / 32;
  const size_t column = static_cast<size_t>(inputs) * 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const bf16* w = weights + static_cast<size_t>(step) * 512;
    _tile_loadd(4, a + step * 32, inputs * 2);
    _tile_loadd(5, a + static_cast<size_t>(16) * inputs + step * 32, inputs * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (blocks > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16 * stride, stride * 4);
  if (blocks > 1) {
    _tile_stored(2, sums + 16, stride * 4);
    _tile_stored(3, sums + 16 * stride + 16, stride * 4);
  }
}
#endif

constexpr int kColumns = 64;  // columns of one work item of a product at most

// Columns of one work item: few rows share the reading of many weights; many rows read few weights from the nearest cache.
inline int columns_of_item(int rows) { return rows > 32 ? kColumns / 2 : kColumns; }

inline int items_of(int outputs, int rows) {
  const int span = columns_of_item(rows);
  return (padded(outputs, 16) + span - 1) / span;
}

// Multiplies all rows of A, [rows rounded up to 32][inputs], with the columns of one work item, and hands each piece of
// sums, [piece rows][kColumns], on: take(first row, count, first column, columns, sums).
template <typename Take>
void product(const Packed& linear, const bf16* a, int rows, int item, const Take& take) {
#ifdef QUIRE_BF16
  alignas(64) float sums[32 * kColumns];
  const int span = columns_of_item(rows), column = item * span, columns = std::min(span, linear.outputs - column);
  const bf16* weights = linear.weights + static_cast<size_t>(column) * linear.inputs;
  for (int row = 0; row < rows; row += 32) {
    const int count = std::min(32, rows - row);
    const bf16* piece = a + static_cast<size_t>(row) * linear.inputs;
#ifdef QUIRE_AMX
    if (use_amx) {
      if (count > 16) {
        product_tiles_32(piece, linear.inputs, weights, std::min(2, columns / 16), sums, kColumns);
        if (columns > 32) {
          const bf16* more = weights + static_cast<size_t>(32) * linear.inputs;
          product_tiles_32(piece, linear.inputs, more, (columns - 32) / 16, sums + 32, kColumns);
        }
      } else {
        product_tiles_16(piece, linear.inputs, weights, columns / 16, sums, kColumns);
      }
      take(row, count, column, columns, sums);
      continue;
    }
#endif
    for (int block = 0; block < columns; block += 16) {
      product_vectors(piece, count, linear.inputs, weights + static_cast<size_t>(block) * linear.inputs, sums + block,
                      kColumns);
    }
    take(row, count, column, columns, sums);
  }
#endif
}

// Attention -----------------------------------------------------------------------------------------------------------

struct Cache {
  void* data;
  int64_t block_stride;  // elements from one block to the next
  int64_t value_offset;  // from a layer's K to its V
  int block_size;
  int heads;  // of K and V
  int head_size;
};

struct Scores {
  float scaling;
  float softcap;  // 0: none
  int window;     // 0: none
};

struct Sequences {
  int count;
  const int32_t* first;   // [count + 1] place of each one's first fed token
  const int32_t* ends;    // [count] tokens, those fed included
  const int32_t* tables;  // [count][width] block ids
  int width;
};

// What one thread needs to attend: the rows of one tile.
struct Scratch {
  alignas(64) float scores[kRows * kChunk];
  alignas(64) bf16 weights[kRows * kChunk];
  alignas(64) bf16 query[kRows * 256];
  alignas(64) float sums[kRows * 256];
  alignas(64) float piece[kRows * 256];
  alignas(64) bf16 tail[kSlots * 256];
  float largest[kRows];
  float total[kRows];
};

// A piece of work: rows of one sequence and KV head over a piece of its slots. Where more query heads than a tile has
// rows share a KV head, `part` says which of them these are.
struct Piece {
  int sequence;
  int head;
  int part;
  int token;   // first of them, within the fed tokens
  int tokens;  // of the tile
  int from, to;  // slots
  int partial;   // index of its partial result, -1: it is the whole
};

inline bool pairs_of(const Cache& cache) {
#ifdef QUIRE_BF16
  return cache.block_size % kSlots == 0 && cache.head_size % 16 == 0;
#else
  return false;
#endif
}

#ifdef QUIRE_BF16
void scores_of_slots(const bf16* query, int rows, int size, const bf16* keys, float* scores) {
#ifdef QUIRE_AMX
  if (use_amx && size % 32 == 0) {
    _tile_zero(0);
    for (int d = 0; d < size; d += 32) {
      _tile_loadd(4, query + d, size * 2);
      _tile_loadd(5, keys + d * kSlots, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores, kChunk * 4);
    return;
  }
#endif
  for (int row = 0; row < rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int d = 0; d < size; d += 4) {
      const bf16* q = query + row * size + d;
      even = _mm512_dpbf16_ps(even, (__m512bh)_mm512_loadu_si512(keys + d * kSlots), pair(q));
      odd = _mm512_dpbf16_ps(odd, (__m512bh)_mm512_loadu_si512(keys + d * kSlots + 32), pair(q + 2));
    }
    _mm512_storeu_ps(scores + row * kChunk, _mm512_add_ps(even, odd));
  }
}

// Adds the weighted values of `slots`, a multiple of 16; values of each 16 slots are at `values[i]`.
void add_values(const bf16* weights, int rows, int size, const bf16* const* values, int slots, float* sums) {
#ifdef QUIRE_AMX
  if (use_amx) {
    for (int d = 0; d < size; d += 64) {
      const int blocks = std::min(4, (size - d) / 16);
      _tile_loadd(0, sums + d, size * 4);
      if (blocks > 1) _tile_loadd(1, sums + d + 16, size * 4);
      if (blocks > 2) _tile_loadd(2, sums + d + 32, size * 4);
      if (blocks > 3) _tile_loadd(3, sums + d + 48, size * 4);
      for (int slot = 0; slot < slots; slot += kSlots) {
        const bf16* v = values[slot / kSlots] + d * 2;
        _tile_loadd(6, weights + slot, kChunk * 2);
        _tile_loadd(7, v, size * 4);
        _tile_dpbf16ps(0, 6, 7);
        if (blocks > 1) {
          _tile_loadd(7, v + 32, size * 4);
          _tile_dpbf16ps(1, 6, 7);
        }
        if (blocks > 2) {
          _tile_loadd(7, v + 64, size * 4);
          _tile_dpbf16ps(2, 6, 7);
        }
        if (blocks > 3) {
          _tile_loadd(7, v + 96, size * 4);
          _tile_dpbf16ps(3, 6, 7);
        }
      }
      _tile_stored(0, sums + d, size * 4);
      if (blocks > 1) _tile_stored(1, sums + d + 16, size * 4);
      if (blocks > 2) _tile_stored(2, sums + d + 32, size * 4);
      if (blocks > 3) _tile_stored(3, sums + d + 48, size * 4);
    }
    return;
  }
#endif
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < size; d += 16) {
      __m512 sum = _mm512_loadu_ps(sums + row * size + d);
      for (int slot = 0; slot < slots; slot += 2) {
        const bf16* v = values[slot / kSlots] + (slot % kSlots) * size + d * 2;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(v), pair(weights + row * kChunk + slot));
      }
      _mm512_storeu_ps(sums + row * size + d, sum);
    }
  }
}

// Softmax of a chunk: turns scores into weights, and corrects what was summed before.
void weigh(Scratch& s, int rows, int size, int slots) {
  for (int row = 0; row < rows; ++row) {
    float* scores = s.scores + row * kChunk;
    __m512 most = _mm512_set1_ps(s.largest[row]);
    for (int slot = 0; slot < slots; slot += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + slot));
    const float largest = _mm512_reduce_max_ps(most);
    bf16* weights = s.weights + row * kChunk;
    if (largest == kMinusInfinity) {  // nothing is seen yet
      std::memset(weights, 0, kChunk * 2);
      continue;
    }
    const float correction = s.largest[row] == kMinusInfinity ? 0.0f : std::exp(s.largest[row] - largest);
    __m512 total = _mm512_setzero_ps();
    for (int slot = 0; slot < slots; slot += 16) {
      const __m512 p = exp_negative(_mm512_sub_ps(_mm512_loadu_ps(scores + slot), _mm512_set1_ps(largest)));
      total = _mm512_add_ps(total, p);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + slot), (__m256i)_mm512_cvtneps_pbh(p));
    }
    if (correction != 1.0f) {
      const __m512 factor = _mm512_set1_ps(correction);
      for (int d = 0; d < size; d += 16) {
        float* sum = s.sums + row * size + d;
        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
      }
    }
    s.total[row] = s.total[row] * correction + _mm512_reduce_add_ps(total);
    s.largest[row] = largest;
  }
}

void cap(float* scores, int rows, int slots, const Scores& how) {
  for (int row = 0; row < rows; ++row) {
    float* line = scores + row * kChunk;
    if (how.softcap == 0.0f) {
      for (int slot = 0; slot < slots; ++slot) line[slot] *= how.scaling;
    } else {
      for (int slot = 0; slot < slots; ++slot) {
        line[slot] = how.softcap * std::tanh(line[slot] * how.scaling / how.softcap);
      }
    }
  }
}

// Hides from each row what it does not see: later slots, those beyond the window, those that do not exist.
void hide(float* scores, int rows, int group, int first, int slots, int position, const Scores& how) {
  for (int row = 0; row < rows; ++row) {
    const int here = position + row / group;
    const int last = here - first;  // the last slot that is seen, and the first that is not hidden by the window
    const int begin = how.window ? std::max(0, here - how.window + 1 - first) : 0;
    float* line = scores + row * kChunk;
    for (int slot = 0; slot < std::min(begin, slots); ++slot) line[slot] = kMinusInfinity;
    for (int slot = std::max(0, last + 1); slot < slots; ++slot) line[slot] = kMinusInfinity;
  }
}

// Asks for the K and V of a chunk before they are needed: blocks lie anywhere, which no prefetcher of the CPU foresees.
void fetch(const Cache& cache, const int32_t* table, int64_t head, int first, int to) {
  const bf16* data = static_cast<const bf16*>(cache.data);
  for (int at = first; at < std::min(first + kChunk, to); at += kSlots) {
    const bf16* block = data + table[at / cache.block_size] * cache.block_stride + head;
    const bf16* keys = block + static_cast<int64_t>(at % cache.block_size) * cache.head_size;
    for (int line = 0; line < kSlots * cache.head_size; line += 32) {
      _mm_prefetch(keys + line, _MM_HINT_T0);
      _mm_prefetch(keys + cache.value_offset + line, _MM_HINT_T0);
    }
  }
}

void attend_pairs(const Cache& cache, const int32_t* table, const Piece& piece, int rows, int group, int position,
                  const Scores& how, Scratch& s) {
  const int size = cache.head_size;
  const bf16* data = static_cast<const bf16*>(cache.data);
  const int64_t head = static_cast<int64_t>(piece.head) * cache.block_size * size;
  for (int first = piece.from / kSlots * kSlots; first < piece.to; first += kChunk) {
    const int slots = std::min(kChunk, padded(piece.to - first, kSlots));
    fetch(cache, table, head, first + kChunk, piece.to);
    const bf16* values[kChunk / kSlots];
    for (int slot = 0; slot < slots; slot += kSlots) {
      const int at = first + slot;
      const bf16* block = data + table[at / cache.block_size] * cache.block_stride + head;
      const int64_t offset = static_cast<int64_t>(at % cache.block_size) * size;
      scores_of_slots(s.query, rows, size, block + offset, s.scores + slot);
      values[slot / kSlots] = block + cache.value_offset + offset;
    }
    cap(s.scores, rows, slots, how);
    hide(s.scores, rows, group, first, slots, position, how);
    if (first < piece.from || first + slots > piece.to) {  // slots of other pieces, or of nobody
      for (int row = 0; row < rows; ++row) {
        for (int slot = 0; slot < slots; ++slot) {
          if (first + slot < piece.from || first + slot >= piece.to) s.scores[row * kChunk + slot] = kMinusInfinity;
        }
      }
    }
    const int valid = piece.to - first;
    if (valid < slots) {
      // A weight of zero times what a former owner left, which may be infinite, would be no number.
      const int at = slots - kSlots;
      std::memcpy(s.tail, values[at / kSlots], sizeof(bf16) * kSlots * size);
      for (int slot = valid - at; slot < kSlots; ++slot) {
        for (int d = 0; d < size; ++d) s.tail[((slot / 2) * size + d) * 2 + slot % 2] = 0;
      }
      values[at / kSlots] = s.tail;
    }
    weigh(s, rows, size, slots);
    add_values(s.weights, rows, size, values, slots, s.sums);
  }
}
#endif

// The same for blocks whose slots lie one after the other.
template <typename T>
void attend_slots(const Cache& cache, const int32_t* table, const Piece& piece, int rows, int group, int position,
                  const Scores& how, const float* query, Scratch& s) {
  const int size = cache.head_size;
  const T* data = static_cast<const T*>(cache.data);
  const int64_t head = static_cast<int64_t>(piece.head) * cache.block_size * size;
  float line[256];
  for (int slot = piece.from; slot < piece.to; ++slot) {
    const T* key = data + table[slot / cache.block_size] * cache.block_stride + head +
                   static_cast<int64_t>(slot % cache.block_size) * size;
    const T* value = key + cache.value_offset;
    for (int d = 0; d < size; ++d) line[d] = element(key + d);
    for (int row = 0; row < rows; ++row) {
      const int here = position + row / group;
      if (slot > here || (how.window && slot <= here - how.window)) continue;
      float score = 0.0f;
      const float* q = query + row * size;
      for (int d = 0; d < size; ++d) score += q[d] * line[d];
      score *= how.scaling;
      if (how.softcap != 0.0f) score = how.softcap * std::tanh(score / how.softcap);
      float* sums = s.sums + row * size;
      if (score > s.largest[row]) {
        const float correction = s.largest[row] == kMinusInfinity ? 0.0f : std::exp(s.largest[row] - score);
        for (int d = 0; d < size; ++d) sums[d] *= correction;
        s.total[row] *= correction;
        s.largest[row] = score;
      }
      const float weight = std::exp(score - s.largest[row]);
      s.total[row] += weight;
      for (int d = 0; d < size; ++d) sums[d] += weight * element(value + d);
    }
  }
}

// A step's attention over one layer. Query and output are [tokens][heads][size], of any of the three types.
struct Attention {
  Cache cache;
  Sequences sequences;
  Scores how;
  int heads;
  int type;  // of the cache: 0 float32, 1 bfloat16, 2 float16
};

// How the query heads of a KV head are put into tiles.
struct Grouping {
  int group;  // query heads of one KV head
  int parts;  // that they are cut into, of at most kRows
  explicit Grouping(const Attention& attention)
      : group(attention.heads / attention.cache.heads), parts((group + kRows - 1) / kRows) {}
  int width(int part) const { return std::min(kRows, group - part * kRows); }
  int tokens() const { return std::max(1, kRows / group); }
};

// Cuts a step's attention into pieces: tiles of 16 rows, and for long sequences pieces of their slots, so that no thread
// has much more to do than another.
struct Pieces {
  std::vector<Piece> all;
  std::vector<int> partials;  // [tokens][kv heads][parts] first partial result of each, which lie together
  std::vector<int> counts;
  int partial_count = 0;

  void plan(const Attention& attention, int threads) {
    const Sequences& sequences = attention.sequences;
    const Grouping grouping(attention);
    const int per_tile = grouping.tokens(), heads = attention.cache.heads * grouping.parts;
    all.clear();
    partial_count = 0;
    int64_t work = 0;
    for (int i = 0; i < sequences.count; ++i) {
      const int fed = sequences.first[i + 1] - sequences.first[i];
      work += static_cast<int64_t>(padded(fed, per_tile) / per_tile) * sequences.ends[i] * heads;
    }
    const int64_t share = threads > 1 ? work / (threads * 4) : work;
    const int split = std::max<int64_t>(kLeastSplit, padded(static_cast<int>(std::min<int64_t>(share, 1 << 20)) + 1, kChunk));
    const int tokens = sequences.first[sequences.count];
    partials.assign(static_cast<size_t>(tokens) * heads, -1);
    counts.assign(static_cast<size_t>(tokens) * heads, 0);
    for (int i = 0; i < sequences.count; ++i) {
      const int fed = sequences.first[i + 1] - sequences.first[i];
      for (int head = 0; head < heads; ++head) {
        for (int token = 0; token < fed; token += per_tile) add(attention, i, head, token, std::min(per_tile, fed - token), split);
      }
    }
    // The longest first, so that what is left for the end is small.
    std::stable_sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) { return a.to - a.from > b.to - b.from; });
  }

 private:
  void add(const Attention& attention, int i, int place_of_head, int token, int tokens, int split) {
    const int parts = Grouping(attention).parts, head = place_of_head / parts, part = place_of_head % parts;
    const Sequences& sequences = attention.sequences;
    const int fed = sequences.first[i + 1] - sequences.first[i], position = sequences.ends[i] - fed + token;
    const int window = attention.how.window, to = position + tokens;
    const int from = window ? std::max(0, position - window + 1) : 0;
    const int pieces = fed > 1 ? 1 : std::max(1, (to - from + split - 1) / split);
    if (pieces == 1) {
      all.push_back({i, head, part, token, tokens, from, to, -1});
      return;
    }
    const size_t place = static_cast<size_t>(sequences.first[i] + token) * attention.cache.heads * parts + place_of_head;
    partials[place] = partial_count;
    counts[place] = pieces;
    const int length = padded((to - from + pieces - 1) / pieces, kSlots);
    for (int piece = 0; piece < pieces; ++piece) {
      const int begin = from + piece * length;
      all.push_back({i, head, part, token, tokens, std::min(begin, to), std::min(begin + length, to), partial_count++});
    }
  }
};

template <typename T>
void take_query(const T* query, int64_t stride, int rows, int group, int size, bool pairs, Scratch& s) {
  for (int row = 0; row < rows; ++row) {
    const T* q = query + row / group * stride + row % group * size;
    for (int d = 0; d < size; ++d) {
      if (pairs) {
        s.query[row * size + d] = narrowed(element(q + d));
      } else {
        s.piece[row * size + d] = element(q + d);
      }
    }
  }
}

// Computes one piece. `partials` is [partial][kRows][size + 2]: sums, the largest score, the total weight.
template <typename T, typename Out>
void attend_piece(const Attention& attention, const Piece& piece, const T* query, int64_t query_stride, Out* output,
                  int64_t output_stride, float* partials, Scratch& s) {
  const Cache& cache = attention.cache;
  const Grouping grouping(attention);
  const int size = cache.head_size, width = grouping.width(piece.part), rows = piece.tokens * width;
  const int64_t offset = (static_cast<int64_t>(piece.head) * grouping.group + piece.part * kRows) * size;
  const int place = attention.sequences.first[piece.sequence] + piece.token;
  const int fed = attention.sequences.first[piece.sequence + 1] - attention.sequences.first[piece.sequence];
  const int position = attention.sequences.ends[piece.sequence] - fed + piece.token;
  const int32_t* table = attention.sequences.tables + static_cast<int64_t>(piece.sequence) * attention.sequences.width;
  const bool pairs = attention.type == 1 && pairs_of(cache);
  for (int row = 0; row < rows; ++row) {
    s.largest[row] = kMinusInfinity;
    s.total[row] = 0.0f;
  }
  std::memset(s.sums, 0, sizeof(float) * kRows * size);
  take_query(query + place * query_stride + offset, query_stride, rows, width, size, pairs, s);
  if (pairs) {
#ifdef QUIRE_BF16
    attend_pairs(cache, table, piece, rows, width, position, attention.how, s);
#endif
  } else if (attention.type == 0) {
    attend_slots<float>(cache, table, piece, rows, width, position, attention.how, s.piece, s);
  } else if (attention.type == 1) {
    attend_slots<bf16>(cache, table, piece, rows, width, position, attention.how, s.piece, s);
  } else {
    attend_slots<_Float16>(cache, table, piece, rows, width, position, attention.how, s.piece, s);
  }
  if (piece.partial >= 0) {
    float* partial = partials + static_cast<size_t>(piece.partial) * kRows * (size + 2);
    for (int row = 0; row < rows; ++row, partial += size + 2) {
      std::memcpy(partial, s.sums + row * size, sizeof(float) * size);
      partial[size] = s.largest[row];
      partial[size + 1] = s.total[row];
    }
    return;
  }
  for (int row = 0; row < rows; ++row) {
    Out* out = output + (place + row / width) * output_stride + offset + row % width * size;
    const float factor = 1.0f / s.total[row];
    for (int d = 0; d < size; ++d) put(out + d, s.sums[row * size + d] * factor);
  }
}

// Puts the pieces of one token, KV head and part together; `item` counts these.
template <typename Out>
void combine(const Attention& attention, const Pieces& pieces, int item, const float* partials, Out* output,
             int64_t output_stride) {
  const Grouping grouping(attention);
  const int size = attention.cache.head_size, heads = attention.cache.heads * grouping.parts;
  const int head = item % heads / grouping.parts, part = item % grouping.parts, count = pieces.counts[item];
  const int64_t offset = (static_cast<int64_t>(head) * grouping.group + part * kRows) * size;
  for (int row = 0; row < grouping.width(part); ++row) {
    const float* first = partials + (static_cast<size_t>(pieces.partials[item]) * kRows + row) * (size + 2);
    const size_t step = static_cast<size_t>(kRows) * (size + 2);
    float largest = kMinusInfinity, total = 0.0f, sums[256] = {};
    for (int i = 0; i < count; ++i) largest = std::max(largest, first[i * step + size]);
    for (int i = 0; i < count; ++i) {
      const float* partial = first + i * step;
      const float factor = partial[size] == kMinusInfinity ? 0.0f : std::exp(partial[size] - largest);
      total += factor * partial[size + 1];
      for (int d = 0; d < size; ++d) sums[d] += factor * partial[d];
    }
    Out* out = output + item / heads * output_stride + offset + row * size;
    for (int d = 0; d < size; ++d) put(out + d, sums[d] / total);
  }
}

template <typename T>
void write_token(const Cache& cache, int type, int64_t slot, const T* key, const T* value) {
  const int size = cache.head_size, offset = static_cast<int>(slot % cache.block_size);
  const int64_t block = slot / cache.block_size * cache.block_stride;
  for (int head = 0; head < cache.heads; ++head) {
    const int64_t base = block + static_cast<int64_t>(head) * cache.block_size * size;
    const T *k = key + static_cast<int64_t>(head) * size, *v = value + static_cast<int64_t>(head) * size;
    if (type == 1 && pairs_of(cache)) {
      bf16* keys = static_cast<bf16*>(cache.data) + base + static_cast<int64_t>(offset / kSlots) * kSlots * size;
      bf16* values = static_cast<bf16*>(cache.data) + base + cache.value_offset + static_cast<int64_t>(offset / 2) * 2 * size;
      for (int d = 0; d < size; ++d) {
        keys[(d / 2 * kSlots + offset % kSlots) * 2 + d % 2] = narrowed(element(k + d));
        values[d * 2 + offset % 2] = narrowed(element(v + d));
      }
      continue;
    }
    const int64_t at = base + static_cast<int64_t>(offset) * size;
    for (int d = 0; d < size; ++d) {
      if (type == 0) {
        static_cast<float*>(cache.data)[at + d] = element(k + d);
        static_cast<float*>(cache.data)[at + cache.value_offset + d] = element(v + d);
      } else if (type == 1) {
        static_cast<bf16*>(cache.data)[at + d] = narrowed(element(k + d));
        static_cast<bf16*>(cache.data)[at + cache.value_offset + d] = narrowed(element(v + d));
      } else {
        static_cast<_Float16*>(cache.data)[at + d] = static_cast<_Float16>(element(k + d));
        static_cast<_Float16*>(cache.data)[at + cache.value_offset + d] = static_cast<_Float16>(element(v + d));
      }
    }
  }
}

struct State {
  std::mutex mutex;  // whoever calls works alone: the team and what lies here are shared
  std::unique_ptr<Team> team;
  std::vector<std::unique_ptr<Scratch>> scratch;
  Pieces pieces;
  Buffer<float> partials;
  Buffer<float> hidden, projected;
  Buffer<bf16> normed, attended, gated;
};

State& state() {
  static State* one = new State;  // its threads end with the process
  return *one;
}

void prepare_team(int threads) {
  State& s = state();
  if (!s.team || s.team->size() != threads) {
    s.team.reset();
    s.team = std::make_unique<Team>(threads);
  }
  while (static_cast<int>(s.scratch.size()) < threads) s.scratch.push_back(std::make_unique<Scratch>());
}

// Runs a step's attention on all threads of the team; every thread calls it.
template <typename T, typename Out>
void attend_together(Team& team, State& s, int thread, const Attention& attention, const T* query, int64_t query_stride,
                     Out* output, int64_t output_stride, float* partials) {
#ifdef QUIRE_AMX
  if (use_amx) configure_attention();
#endif
  team.each(static_cast<int>(s.pieces.all.size()), [&](int item) {
    attend_piece(attention, s.pieces.all[item], query, query_stride, output, output_stride, partials, *s.scratch[thread]);
  });
  if (s.pieces.partial_count == 0) return;
  team.each(static_cast<int>(s.pieces.counts.size()), [&](int item) {
    if (s.pieces.counts[item]) combine(attention, s.pieces, item, partials, output, output_stride);
  });
}

// The decoder -----------------------------------------------------------------------------------------------------------

void normalize(const float* x, int size, const float* weight, float epsilon, bf16* out) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
  for (int i = 0; i < size; ++i) out[i] = narrowed(x[i] * factor * weight[i]);
}

void normalize_head(float* x, int size, const float* weight, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < size; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
  for (int i = 0; i < size; ++i) x[i] *= factor * weight[i];
}

void rotate(float* x, int size, const float* cosine, const float* sine) {
  const int half = size / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Memory ---------------------------------------------------------------------------------------------------------------

// Copies bytes that nobody reads soon. Stores through the caches would first read what they overwrite: half as much traffic
// again.
void copy_past_the_caches(char* target, const char* source, int64_t bytes) {
#ifdef __AVX512F__
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 63);
  std::memcpy(target, source, head);
  int64_t done = head;
  for (; done + 64 <= bytes; done += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
  }
  std::memcpy(target + done, source + done, bytes - done);
  _mm_sfence();  // before another thread is told that the copy is there
#else
  std::memcpy(target, source, bytes);
#endif
}

}  // namespace

extern "C" {

struct QuireLayer {
  const bf16* projections;  // q, k, v one after the other, packed
  const bf16* output;
  const bf16* gates;  // 16 columns of the gate, 16 of the product that it gates, and so on
  const bf16* down;
  const float* attention_norm;
  const float* mlp_norm;
  const float* projection_bias;  // or null
  const float* query_norm;       // or null
  const float* key_norm;         // or null
  int32_t window;                // 0: none
};

struct QuireDecoder {
  int32_t layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary;
  float epsilon, scaling;
  const QuireLayer* layer;
  const bf16* embedding;  // [vocabulary][hidden]
  const bf16* head;       // packed
  const float* final_norm;
  const float* cosine;  // [positions][head size / 2]
  const float* sine;
};

struct QuireCache {
  void* data;
  int64_t block_stride;
  int64_t layer_stride;
  int64_t value_offset;
  int32_t block_size, heads, head_size;
  int32_t type;
};

struct QuireBatch {
  int32_t tokens, sequences, width, rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* first;
  const int32_t* ends;
  const int32_t* tables;
  const int32_t* places;  // [rows] tokens whose logits are wanted
};

// Bit 0: products of bfloat16, bit 1: tiles. Without bit 0 there is attention alone.
int32_t quire_features(int32_t allow_tiles) {
  int32_t features = 0;
#ifdef QUIRE_BF16
  features |= 1;
#endif
#ifdef QUIRE_AMX
  use_amx = allow_tiles && ask_for_tiles();
  if (use_amx) features |= 2;
#endif
  (void)allow_tiles;
  return features;
}

// Packs [outputs][inputs] weights; `packed` has room for both rounded up, to 16 and to 32, and is zero.
void quire_pack(const bf16* weights, int32_t outputs, int32_t inputs, bf16* packed) {
  const int steps = padded(inputs, 32) / 32;
  for (int n = 0; n < outputs; ++n) {
    for (int k = 0; k < inputs; ++k) {
      const size_t tile = static_cast<size_t>(n / 16) * steps + k / 32;
      packed[tile * 512 + (k % 32 / 2 * 16 + n % 16) * 2 + k % 2] = weights[static_cast<size_t>(n) * inputs + k];
    }
  }
}

// Writes K and V of each token, [tokens][heads][size] of float32 (0), bfloat16 (1) or float16 (2), to its slot.
void quire_write(const QuireCache* c, int32_t layer, const void* key, const void* value, int64_t stride, int32_t tokens,
                 const int64_t* slots) {
  char* data = static_cast<char*>(c->data) + layer * c->layer_stride * (c->type == 0 ? 4 : 2);
  const Cache cache{data, c->block_stride, c->value_offset, c->block_size, c->heads, c->head_size};
  for (int token = 0; token < tokens; ++token) {
    const int64_t at = token * stride;
    if (c->type == 0) {
      write_token(cache, 0, slots[token], static_cast<const float*>(key) + at, static_cast<const float*>(value) + at);
    } else if (c->type == 1) {
      write_token(cache, 1, slots[token], static_cast<const bf16*>(key) + at, static_cast<const bf16*>(value) + at);
    } else {
      write_token(cache, 2, slots[token], static_cast<const _Float16*>(key) + at, static_cast<const _Float16*>(value) + at);
    }
  }
}

// Attends with [tokens][heads][size] queries of the cache's type; the output has their type and is contiguous.
void quire_attend(const QuireCache* c, int32_t layer, const QuireBatch* b, const void* query, int64_t stride,
                  void* output, int32_t heads, float scaling, float softcap, int32_t window, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  char* data = static_cast<char*>(c->data) + layer * c->layer_stride * (c->type == 0 ? 4 : 2);
  const Attention attention{{data, c->block_stride, c->value_offset, c->block_size, c->heads, c->head_size},
                            {b->sequences, b->first, b->ends, b->tables, b->width},
                            {scaling, softcap, window},
                            heads,
                            c->type};
  s.pieces.plan(attention, threads);
  float* partials = s.partials.at_least(static_cast<size_t>(s.pieces.partial_count) * kRows * (c->head_size + 2) + 1);
  const int64_t wide = static_cast<int64_t>(heads) * c->head_size;
  s.team->run([&](int thread) {
    if (c->type == 0) {
      attend_together(*s.team, s, thread, attention, static_cast<const float*>(query), stride,
                      static_cast<float*>(output), wide, partials);
    } else if (c->type == 1) {
      attend_together(*s.team, s, thread, attention, static_cast<const bf16*>(query), stride,
                      static_cast<bf16*>(output), wide, partials);
    } else {
      attend_together(*s.team, s, thread, attention, static_cast<const _Float16*>(query), stride,
                      static_cast<_Float16*>(output), wide, partials);
    }
  });
}

// Reads memory, a multiple of 1 MiB, as fast as it can be read, and returns a number that depends on all of it.
int64_t quire_read(const void* data, int64_t bytes, int32_t threads) {
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  constexpr int64_t kPiece = 1 << 20;
  std::atomic<int64_t> total{0};
  s.team->run([&](int) {
    s.team->each(static_cast<int>(bytes / kPiece), [&](int item) {
      const int64_t* piece = static_cast<const int64_t*>(data) + item * (kPiece / 8);
      int64_t sums[64] = {};
      for (int64_t i = 0; i < kPiece / 8; i += 64) {
        for (int lane = 0; lane < 64; ++lane) sums[lane] ^= piece[i + lane];
      }
      int64_t sum = 0;
      for (int64_t one : sums) sum ^= one;
      total.fetch_xor(sum);
    });
  });
  return total;
}

// Copies whole blocks, of `bytes` each: row `pairs[2 i]` of the source to row `pairs[2 i + 1]` of the target. No row is a
// source and a target. The pieces that threads take are smaller than a block, so that they end together.
void quire_copy(const void* source, void* target, const int64_t* pairs, int32_t count, int64_t bytes, int32_t threads) {
  constexpr int64_t kPiece = 128 << 10;
  constexpr int64_t kAlone = 512 << 10;  // is copied before another thread would be awake
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const auto copy = [&](int item) {
    const int64_t* pair = pairs + 2 * (item / pieces);
    const int64_t begin = item % pieces * kPiece;
    copy_past_the_caches(static_cast<char*>(target) + pair[1] * bytes + begin,
                         static_cast<const char*>(source) + pair[0] * bytes + begin, std::min(kPiece, bytes - begin));
  };
  const int items = static_cast<int>(count * pieces);
  if (count * bytes <= kAlone) {
    for (int item = 0; item < items; ++item) copy(item);
    return;
  }
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  s.team->run([&](int) { s.team->each(items, copy); });
}

// Runs a whole step of a decoder; `logits` is [rows][vocabulary].
void quire_step(const QuireDecoder* d, const QuireCache* c, const QuireBatch* b, float* logits, int32_t threads) {
#ifdef QUIRE_BF16
  State& s = state();
  const std::lock_guard<std::mutex> alone(s.mutex);
  prepare_team(threads);
  Team& team = *s.team;
  const int tokens = b->tokens, tall = padded(std::max(tokens, static_cast<int>(b->rows)), 32), size = d->head_size;
  const int queries = d->heads * size, keys = d->kv_heads * size, wide = queries + 2 * keys, wide_padded = padded(wide, 16);
  const int in = padded(d->hidden, 32), in_attended = padded(queries, 32), in_gated = padded(d->intermediate, 32);
  float* x = s.hidden.at_least(static_cast<size_t>(tokens) * d->hidden);
  float* qkv = s.projected.at_least(static_cast<size_t>(tokens) * wide_padded);
  bf16* normed = s.normed.at_least(static_cast<size_t>(tall) * in);
  bf16* attended = s.attended.at_least(static_cast<size_t>(tall) * in_attended);
  bf16* gated = s.gated.at_least(static_cast<size_t>(tall) * in_gated);
  Attention attention{{nullptr, c->block_stride, c->value_offset, c->block_size, c->heads, c->head_size},
                      {b->sequences, b->first, b->ends, b->tables, b->width},
                      {d->scaling, 0.0f, 0},
                      d->heads,
                      1};
  int planned = -1;  // window that the pieces were planned for
  float* partials = nullptr;

  const auto add = [&](const Packed& linear, const bf16* a, int item) {
    product(linear, a, tokens, item, [&](int row, int count, int column, int columns, const float* sums) {
      const int real = std::min(columns, d->hidden - column);
      for (int i = 0; i < count; ++i) {
        float* to = x + static_cast<size_t>(row + i) * d->hidden + column;
        for (int n = 0; n < real; ++n) to[n] += sums[i * kColumns + n];
      }
    });
  };
  const auto products = [] {
#ifdef QUIRE_AMX
    if (use_amx) configure_products();
#endif
  };

  team.run([&](int thread) {
    team.each(tokens, [&](int token) {
      const bf16* row = d->embedding + static_cast<size_t>(b->token_ids[token]) * d->hidden;
      for (int i = 0; i < d->hidden; ++i) x[static_cast<size_t>(token) * d->hidden + i] = widened(row[i]);
    });
    for (int number = 0; number < d->layers; ++number) {
      const QuireLayer& layer = d->layer[number];
      team.each(tokens, [&](int token) {
        normalize(x + static_cast<size_t>(token) * d->hidden, d->hidden, layer.attention_norm, d->epsilon,
                  normed + static_cast<size_t>(token) * in);
      });
      products();
      team.each(items_of(wide, tokens), [&](int item) {
        product({layer.projections, wide_padded, in}, normed, tokens, item,
                [&](int row, int count, int column, int columns, const float* sums) {
                  for (int i = 0; i < count; ++i) {
                    float* to = qkv + static_cast<size_t>(row + i) * wide_padded + column;
                    std::memcpy(to, sums + i * kColumns, sizeof(float) * columns);
                    if (layer.projection_bias) {
                      const int real = std::min(columns, wide - column);
                      for (int n = 0; n < real; ++n) to[n] += layer.projection_bias[column + n];
                    }
                  }
                });
      });
      if (thread == 0) {
        attention.cache.data = static_cast<bf16*>(c->data) + number * c->layer_stride;
        attention.how.window = layer.window;
        if (planned != layer.window) {
          s.pieces.plan(attention, threads);
          planned = layer.window;
          partials = s.partials.at_least(static_cast<size_t>(s.pieces.partial_count) * kRows * (size + 2) + 1);
        }
      }
      team.barrier();
      team.each(tokens, [&](int token) {
        float* line = qkv + static_cast<size_t>(token) * wide_padded;
        const float* cosine = d->cosine + static_cast<size_t>(b->positions[token]) * (size / 2);
        const float* sine = d->sine + static_cast<size_t>(b->positions[token]) * (size / 2);
        for (int head = 0; head < d->heads + d->kv_heads; ++head) {
          const float* norm = head < d->heads ? layer.query_norm : layer.key_norm;
          if (norm) normalize_head(line + head * size, size, norm, d->epsilon);
          rotate(line + head * size, size, cosine, sine);
        }
        write_token(attention.cache, 1, b->slots[token], line + queries, line + queries + keys);
      });
      attend_together(team, s, thread, attention, static_cast<const float*>(qkv), wide_padded, attended, in_attended, partials);
      products();
      const int items = items_of(d->hidden, tokens), outputs = padded(d->hidden, 16);
      team.each(items, [&](int item) { add({layer.output, outputs, in_attended}, attended, item); });
      team.each(tokens, [&](int token) {
        normalize(x + static_cast<size_t>(token) * d->hidden, d->hidden, layer.mlp_norm, d->epsilon,
                  normed + static_cast<size_t>(token) * in);
      });
      const int gate_columns = 2 * padded(d->intermediate, 16);
      team.each(items_of(gate_columns, tokens), [&](int item) {
        product({layer.gates, gate_columns, in}, normed, tokens, item,
                [&](int row, int count, int column, int columns, const float* sums) {
                  for (int i = 0; i < count; ++i) {
                    for (int block = 0; block < columns; block += 32) {
                      const float* gate = sums + i * kColumns + block;
                      const int to = (column + block) / 2;
                      const __m512 g = _mm512_loadu_ps(gate);
                      // silu(g) = g / (1 + exp(-g)), by whichever exponent is not positive
                      const __m512 e = exp_negative(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(g)));
                      const __mmask16 below = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
                      const __m512 top = _mm512_mask_mul_ps(g, below, g, e);
                      const __m512 silu = _mm512_div_ps(top, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
                      const __m512 result = _mm512_mul_ps(silu, _mm512_loadu_ps(gate + 16));
                      bf16* out = gated + static_cast<size_t>(row + i) * in_gated + to;
                      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(result));
                    }
                  }
                });
      });
      team.each(items, [&](int item) { add({layer.down, outputs, in_gated}, gated, item); });
    }
    team.each(b->rows, [&](int row) {
      normalize(x + static_cast<size_t>(b->places[row]) * d->hidden, d->hidden, d->final_norm, d->epsilon,
                normed + static_cast<size_t>(row) * in);
    });
    products();
    team.each(items_of(d->vocabulary, b->rows), [&](int item) {
      product({d->head, padded(d->vocabulary, 16), in}, normed, b->rows, item,
              [&](int row, int count, int column, int columns, const float* sums) {
                const int real = std::min(columns, d->vocabulary - column);
                for (int i = 0; i < count; ++i) {
                  std::memcpy(logits + static_cast<size_t>(row + i) * d->vocabulary + column, sums + i * kColumns,
                              sizeof(float) * real);
                }
              });
    });
#ifdef QUIRE_AMX
    if (use_amx) _tile_release();
#endif
  });
#endif
  (void)d, (void)c, (void)b, (void)logits, (void)threads;
}

}  // extern "C"
