// AMX: configuration of its tiles.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "numbers.h"

namespace quire {

// Whether the CPU has tiles and they are enabled.
inline bool use_amx = false;

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

// Sums in tiles 0 to 3, two pieces of the left operand in 4 and 5, two of the right operand in 6 and 7.
inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  _tile_loadconfig(&config);
}

// Enables tiles during its lifetime. Threads without tiles have less state to save at a context switch.
struct Tiles {
  Tiles() {
    if (use_amx) configure_tiles();
  }
  ~Tiles() {
    if (use_amx) _tile_release();
  }
  Tiles(const Tiles&) = delete;
};

inline bool ask_for_tiles() {
  constexpr int kAskPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#else
struct Tiles {
  Tiles() {}
};
#endif

}  // namespace quire
