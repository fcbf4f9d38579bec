// Free blocks of device memory: see gds_stage.h.
#include "gds/gds_stage.h"

#include "check.h"

namespace fastckpt {

GdsStage::GdsStage(std::shared_ptr<GdsBlocks> blocks)
    : blocks_(std::move(blocks)),
      crc_(blocks_->queue()),
      words_(blocks_->queue(), blocks_->count() * kWords * sizeof(uint32_t)) {
    for (size_t number = blocks_->count(); number-- > 0;) free_.push_back(number);
}

GdsStage::~GdsStage() { CHECK(free_.size() == blocks_->count()); }

size_t GdsStage::acquire() {
    if (free_.empty()) return kNone;
    const size_t number = free_.back();
    free_.pop_back();
    return number;
}

void GdsStage::release(size_t number) {
    CHECK(number < blocks_->count() && free_.size() < blocks_->count());
    free_.push_back(number);
}

size_t GdsStage::number(const std::byte* block) const {
    const auto within = static_cast<size_t>(block - blocks_->base());
    CHECK(within % block_bytes() == 0 && within / block_bytes() < blocks_->count());
    return within / block_bytes();
}

uint32_t* GdsStage::words(size_t number) const {
    return reinterpret_cast<uint32_t*>(words_.data()) + number * kWords;
}

}  // namespace fastckpt
