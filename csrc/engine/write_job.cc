// WriteJob: copies an image's segments into blocks, checksums them in the same pass, and fills in
// the CRC slots in file order. See engine.h for the contract; it knows no format.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "check.h"
#include "crc32/crc32.h"
#include "engine/write_block.h"

namespace fastckpt {

namespace {
constexpr uint64_t kDirectAlign = 4096;
constexpr uint64_t kSlotBytes = 4;
constexpr size_t kConvertedAtOnce = 16 << 10;  // which the first-level cache holds
}  // namespace

WriteJob::WriteJob(Engine& engine, std::vector<Segment> segments, std::vector<Slot> slots,
                   std::vector<DeviceRange> devices, std::shared_ptr<GdsStage> gds,
                   std::shared_ptr<Allowance> allowance, unsigned stagers_limit,
                   std::vector<NumberRun> numbers, std::vector<Conversion> conversions,
                   std::shared_ptr<Known> known)
    : engine_(engine),
      segments_(std::move(segments)),
      slots_(std::move(slots)),
      devices_(std::move(devices)),
      gds_(std::move(gds)),
      allowance_(std::move(allowance)),
      stagers_limit_(std::max(1U, stagers_limit)),
      numbers_(std::move(numbers)),
      conversions_(std::move(conversions)),
      known_(std::move(known)) {
    check_plan();
    check_conversions();
    nbytes_ = segments_.back().offset + segments_.back().nbytes;
    check_numbers();
    CHECK(known_ == nullptr || (slots_.empty() && conversions_.empty() &&
                                engine_.block_bytes() % known_->chunk_bytes() == 0));
    non_finite_.assign(numbers_.size(), 0);
    const size_t block_bytes = engine_.block_bytes();
    const size_t count = (nbytes_ + block_bytes - 1) / block_bytes;
    blocks_.resize(count);
    block_crcs_.resize(count);
    slot_crcs_.resize(slots_.size());
    slot_of_segment_.assign(segments_.size(), -1);
    for (size_t i = 0; i < slots_.size(); ++i) {
        int64_t& first = slot_of_segment_[slots_[i].segment];
        CHECK(first < 0 || slots_[i - 1].segment == slots_[i].segment);
        if (first < 0) first = static_cast<int64_t>(i);
    }
    // A segment with a slot is copied and checksummed as it is, so it cannot hold a slot itself.
    for (const Slot& slot : slots_)
        CHECK(slot.offset >= nbytes_ || slot_of_segment_[slot.segment + 1] < 0);
    start_clocks();
}

WriteJob::~WriteJob() { CHECK(blocks_held_ == 0); }

void WriteJob::check_plan() const {
    CHECK(!segments_.empty());
    uint64_t expected = 0;
    for (const Segment& segment : segments_) {
        CHECK(segment.offset == expected && segment.nbytes > 0 && segment.address != 0);
        expected += segment.nbytes;
    }
    uint64_t slots_end = 0;
    for (const Slot& slot : slots_) {
        CHECK(slot.segment < segments_.size() && slot.offset >= slots_end);
        slots_end = slot.offset + kSlotBytes;
        if (slot.offset >= expected) continue;  // it lies beyond the image
        CHECK(slot.segment + 1 < segments_.size());
        const Segment& holder = segments_[slot.segment + 1];
        CHECK(slot.offset >= holder.offset && slots_end <= holder.offset + holder.nbytes);
    }
}

// No number crosses the end of a block.
void WriteJob::check_numbers() const {
    uint64_t end = 0;
    for (const NumberRun& run : numbers_) {
        CHECK(run.width > 0 && engine_.block_bytes() % run.width == 0);
        CHECK(run.begin >= end && run.end > run.begin && run.end <= nbytes_);
        CHECK(run.begin % run.width == 0 && run.end % run.width == 0);
        end = run.end;
    }
}

void WriteJob::check_conversions() const {
    for (const Conversion& each : conversions_) {
        CHECK(&each == conversions_.data() || each.segment > (&each)[-1].segment);
        CHECK(each.segment < segments_.size() && each.held < kDtypes && each.staged < kDtypes);
        const auto staged = static_cast<Dtype>(each.staged);
        CHECK(is_castable(static_cast<Dtype>(each.held), staged));
        const Segment& segment = segments_[each.segment];
        CHECK(range_of(devices_, segment.address) == nullptr);
        const uint64_t width = width_of(staged);
        CHECK(segment.offset % width == 0 && segment.nbytes % width == 0);
        CHECK(engine_.block_bytes() % width == 0);
    }
    CHECK(conversions_.empty() || slots_.empty());  // what holds a slot is copied as it is
}

// Returns how a segment is converted; null if it is copied as it is.
const Conversion* WriteJob::conversion_of(const Segment& segment) const {
    const auto number = static_cast<uint64_t>(&segment - segments_.data());
    const auto found = std::lower_bound(
        conversions_.begin(), conversions_.end(), number,
        [](const Conversion& each, uint64_t wanted) { return each.segment < wanted; });
    return found != conversions_.end() && found->segment == number ? &*found : nullptr;
}

uint64_t WriteJob::block_nbytes(size_t index) const {
    const uint64_t begin = index * engine_.block_bytes();
    return std::min<uint64_t>(engine_.block_bytes(), nbytes_ - begin);
}

bool WriteJob::wants_stager() const {
    return failure_.error == 0 && next_claim_ < blocks_.size() && stagers_ < stagers_limit_ &&
           !has_used_allowance();
}

bool WriteJob::has_used_allowance() const { return allowance_->held_ >= allowance_->blocks_; }

// Begins to count the time until claim(), if no thread copies for this job.
void WriteJob::note_no_memory() {
    if (stagers_ == 0 && !no_memory_since_) no_memory_since_ = Clock::now();
}

bool WriteJob::queued() const {
    return stagers_ == 0 && (failure_.error != 0 || next_claim_ == blocks_.size());
}

bool WriteJob::sources_released() const { return queued() && arriving_ == 0; }

bool WriteJob::finished() const { return sources_released() && blocks_under_way_ == 0; }

WriteJob::Block& WriteJob::claim(std::byte* memory, size_t direct) {
    auto block = std::make_unique<Block>();
    block->index = next_claim_++;
    block->begin = block->index * engine_.block_bytes();
    block->end = block->begin + block_nbytes(block->index);
    block->memory = memory;
    block->direct = direct;
    if (no_memory_since_) memory_waited_ += Clock::now() - *no_memory_since_;
    no_memory_since_.reset();
    ++blocks_under_way_;
    ++blocks_held_;
    allowance_->held_max_ = std::max(allowance_->held_max_, ++allowance_->held_);
    blocks_[block->index] = std::move(block);
    return *blocks_[next_claim_ - 1];
}

void WriteJob::copied(Block& block) {
    block.state = State::copied;
    if (block.device_error != cuda::kSuccess)
        fail({Op::Kind::copy, block.begin, block.device_error});
    for (const auto& [run, count] : block.non_finite) non_finite_[run] += count;
    size_t& under_way = block.is_arriving ? arriving_ : stagers_;
    CHECK(under_way > 0);
    --under_way;
    if (block.is_known()) release(block);
    seal_ready_blocks();
}

// Copies bytes [begin, end) of the image, which are a segment's, from the host's memory, converted
// if need be. Returns their CRC-32.
uint32_t WriteJob::copy_host(std::byte* target, const Segment& segment, uint64_t begin,
                             uint64_t end, uint32_t crc) const {
    const auto* source = reinterpret_cast<const std::byte*>(segment.address);
    const uint64_t first = begin - segment.offset, nbytes = end - begin;
    const Conversion* const conversion = conversion_of(segment);
    if (conversion == nullptr) return crc32_copy(target, source + first, nbytes, crc);
    const auto held = static_cast<Dtype>(conversion->held);
    const auto staged = static_cast<Dtype>(conversion->staged);
    const uint64_t wide = width_of(held), narrow = width_of(staged);
    source += first / narrow * wide;
    std::byte some[kConvertedAtOnce];
    for (uint64_t at = 0; at < nbytes; at += sizeof some) {
        const uint64_t n = std::min<uint64_t>(sizeof some, nbytes - at);
        cast(held, staged, source + at / narrow * wide, some, n / narrow);
        crc = crc32_copy(target + at, some, n, crc);
    }
    return crc;
}

// Copies a piece of a block, unless gather() has done so, and returns its CRC-32.
uint32_t WriteJob::copy_piece(Block& block, const Segment& segment, uint64_t begin, uint64_t end,
                              uint32_t crc) const {
    if (block.is_direct()) return direct_crc(block, begin, end - begin);
    std::byte* target = block.memory + (begin - block.begin);
    if (block.is_arriving) return crc32(crc, target, end - begin);
    return copy_host(target, segment, begin, end, crc);
}

void WriteJob::copy(Block& block) {
    block.known = pass_known(block);
    if (!block.is_known()) copy_from(block, block.begin + block.known);
}

// Looks at a block, chunk by chunk, until one is not known; returns how many bytes that passes. The
// memory may change meanwhile, so hash, CRC-32 and numbers are all taken of one copy, in the cache.
uint64_t WriteJob::pass_known(Block& block) const {
    if (known_ == nullptr || block.is_arriving || block.is_direct()) return 0;
    std::vector<std::byte> chunk(known_->chunk_bytes());
    uint64_t at = block.begin;
    while (at < block.end) {
        const uint64_t end = std::min<uint64_t>(block.end, at + chunk.size());
        if (!fetch(at, end, chunk.data())) break;
        const std::optional<uint32_t> crc = known_->crc_if_known(at, chunk.data(), end - at);
        if (!crc) break;
        block.append(*crc, end - at);
        look_at_numbers(block, chunk.data(), at, end);
        at = end;
    }
    return at - block.begin;
}

// Copies bytes [begin, end) of the image to `target`; returns false if some lie on a device.
bool WriteJob::fetch(uint64_t begin, uint64_t end, std::byte* target) const {
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    --segment;
    for (uint64_t at = begin; at < end; ++segment) {
        if (range_of(devices_, segment->address) != nullptr) return false;
        const auto* bytes = reinterpret_cast<const std::byte*>(segment->address);
        const uint64_t nbytes = std::min(end, segment->offset + segment->nbytes) - at;
        std::memcpy(target + (at - begin), bytes + (at - segment->offset), nbytes);
        at += nbytes;
    }
    return true;
}

// Copies what a block has from `from` on.
void WriteJob::copy_from(Block& block, uint64_t from) {
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), from,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    CHECK(segment != segments_.begin());
    for (--segment; segment != segments_.end() && segment->offset < block.end; ++segment) {
        const uint64_t segment_end = segment->offset + segment->nbytes;
        const uint64_t begin = std::max(from, segment->offset);
        const uint64_t end = std::min(block.end, segment_end);
        const int64_t slot = slot_of_segment_[static_cast<size_t>(segment - segments_.begin())];
        if (slot < 0) {
            copy_header(block, *segment, begin, end);
            continue;
        }
        const uint32_t crc = copy_piece(block, *segment, begin, end, 0);
        block.append(crc, end - begin);
        const bool began_earlier = segment->offset < block.begin;
        const bool goes_on = segment_end > block.end;
        if (began_earlier) block.head_crc = crc;
        if (goes_on) block.tail_crc = crc;
        if (!began_earlier && !goes_on) describe(slot, crc);
    }
    if (block.is_direct()) return;  // it has whole pages
    // A direct write, if one is chosen later, writes whole pages: without what was here before.
    const uint64_t nbytes = block.end - block.begin;
    const uint64_t padded = (nbytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
    std::memset(block.memory + nbytes, 0, padded - nbytes);
    look_at_numbers(block, block.memory + (from - block.begin), from, block.end);
}

// Counts the numbers of bytes [first, end) of the image, which are a block's, that are not finite.
void WriteJob::look_at_numbers(Block& block, const std::byte* bytes, uint64_t first,
                               uint64_t end) const {
    auto run = std::upper_bound(numbers_.begin(), numbers_.end(), first,
                                [](uint64_t at, const NumberRun& r) { return at < r.end; });
    for (; run != numbers_.end() && run->begin < end; ++run) {
        const uint64_t begin = std::max(first, run->begin);
        const uint64_t nbytes = std::min(end, run->end) - begin;
        const uint64_t count =
            count_non_finite(bytes + (begin - first), nbytes, run->width, run->mask);
        if (count > 0) block.non_finite.emplace_back(run - numbers_.begin(), count);
    }
}

// Notes the CRC of a segment for all of its slots, given the first one.
void WriteJob::describe(int64_t slot, uint32_t crc) {
    const uint64_t segment = slots_[static_cast<size_t>(slot)].segment;
    for (auto i = static_cast<size_t>(slot); i < slots_.size() && slots_[i].segment == segment; ++i)
        slot_crcs_[i] = crc;
}

// Whether a slot of the segment before `index` overlaps [begin, end).
bool WriteJob::holds_slot(size_t index, uint64_t begin, uint64_t end) const {
    const int64_t first = index > 0 ? slot_of_segment_[index - 1] : -1;
    if (first < 0) return false;
    for (auto i = static_cast<size_t>(first); i < slots_.size(); ++i) {
        if (slots_[i].segment != index - 1) return false;
        if (slots_[i].offset < end && slots_[i].offset + kSlotBytes > begin) return true;
    }
    return false;
}

// Copies a piece of a segment that has no slot, and which therefore may hold slots itself.
void WriteJob::copy_header(Block& block, const Segment& segment, uint64_t begin, uint64_t end) {
    const auto index = static_cast<size_t>(&segment - segments_.data());
    if (!holds_slot(index, begin, end)) {
        block.append(copy_piece(block, segment, begin, end, 0), end - begin);
        return;
    }
    CHECK(!block.is_direct());
    std::byte* target = block.memory + (begin - block.begin);
    const auto* source = reinterpret_cast<const std::byte*>(segment.address);
    if (!block.is_arriving) std::memcpy(target, source + (begin - segment.offset), end - begin);
    if (segments_[index - 1].offset < block.begin) {
        CHECK(!block.has_late());
        block.late_begin = begin;
        block.late_end = end;
        return;
    }
    patch(block, begin, end);
    block.append(crc32(0, target, end - begin), end - begin);
}

// Writes CRCs into the slots, or parts of slots, that lie in [begin, end) of the block.
void WriteJob::patch(Block& block, uint64_t begin, uint64_t end) const {
    auto slot =
        std::lower_bound(slots_.begin(), slots_.end(), begin,
                         [](const Slot& s, uint64_t at) { return s.offset + kSlotBytes <= at; });
    for (; slot != slots_.end() && slot->offset < end; ++slot) {
        const uint32_t crc = slot_crcs_[static_cast<size_t>(slot - slots_.begin())];
        for (uint64_t i = 0; i < kSlotBytes; ++i) {
            const uint64_t at = slot->offset + i;
            if (at >= begin && at < end)
                block.memory[at - block.begin] = static_cast<std::byte>(crc >> (8 * i));
        }
    }
}

// Completes the CRC of a segment that ends here, then the block's own. Called in file order, under
// the engine's mutex, since both depend on the blocks before.
void WriteJob::seal(Block& block) {
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), block.begin,
                                    [](uint64_t at, const Segment& s) { return at < s.offset; });
    --segment;
    const auto first = static_cast<size_t>(segment - segments_.begin());
    const uint64_t first_end = segment->offset + segment->nbytes;
    const bool first_is_open = segment->offset < block.begin && slot_of_segment_[first] >= 0;
    if (first_is_open) {
        const uint64_t nbytes = std::min(first_end, block.end) - block.begin;
        open_segment_crc_ = crc32_combine(open_segment_crc_, block.head_crc, nbytes);
        if (first_end <= block.end) describe(slot_of_segment_[first], open_segment_crc_);
    }
    // If the last segment goes on, it is the open one from here.
    if (!first_is_open || first_end <= block.end) open_segment_crc_ = block.tail_crc;
    RunCrc crc = block.before;
    if (block.has_late()) {
        patch(block, block.late_begin, block.late_end);
        const uint64_t nbytes = block.late_end - block.late_begin;
        crc.append(crc32(0, block.memory + (block.late_begin - block.begin), nbytes), nbytes);
        if (block.after.nbytes > 0) crc.append(block.after.crc, block.after.nbytes);
    }
    CHECK(crc.nbytes == block.end - block.begin);
    block_crcs_[block.index] = crc.crc;
    block.state = State::sealed;
}

void WriteJob::seal_ready_blocks() {
    for (; next_seal_ < blocks_.size(); ++next_seal_) {
        Block* block = blocks_[next_seal_].get();
        if (block == nullptr || block->state != State::copied) break;
        if (failure_.error != 0)
            block->state = State::sealed;
        else
            seal(*block);
    }
    submit_ready_blocks();
}

void WriteJob::on_written(Block& block) {
    CHECK(block.state == State::sealed && blocks_under_way_ > 0);
    if (block.holds_memory()) release(block);
    block.state = State::written;
    --blocks_under_way_;
}

// Gives a block's memory back.
void WriteJob::release(Block& block) {
    CHECK(block.memory != nullptr || block.is_direct());
    if (block.is_direct())
        gds_->release(std::exchange(block.direct, GdsStage::kNone));
    else
        engine_.arena_.release(std::exchange(block.memory, nullptr));
    CHECK(blocks_held_ > 0 && allowance_->held_ > 0);
    --blocks_held_;
    --allowance_->held_;
}

void WriteJob::fail(const Failure& failure) {
    if (failure_.error == 0) failure_ = failure;
    patience_.end.store(1);  // long ago, since nothing of this job is worth another try
}

bool WriteJob::wait_queued(std::chrono::duration<double> timeout) {
    std::unique_lock lock(engine_.mu_);
    return engine_.changed_.wait_for(lock, timeout, [&] { return queued(); });
}

int WriteJob::pin_error() {
    std::lock_guard lock(engine_.mu_);
    return pin_error_;
}

bool WriteJob::wait_staged(std::chrono::duration<double> timeout) {
    std::unique_lock lock(engine_.mu_);
    return engine_.changed_.wait_for(lock, timeout, [&] { return sources_released(); });
}

bool WriteJob::wait_written(std::chrono::duration<double> timeout) {
    std::unique_lock lock(engine_.mu_);
    return engine_.changed_.wait_for(lock, timeout, [&] { return finished(); });
}

Failure WriteJob::failure() {
    std::lock_guard lock(engine_.mu_);
    return failure_;
}

uint64_t WriteJob::nbytes_written() {
    std::lock_guard lock(engine_.mu_);
    return nbytes_written_;
}

std::vector<uint32_t> WriteJob::block_crcs() {
    std::lock_guard lock(engine_.mu_);
    CHECK(next_seal_ == blocks_.size());
    return block_crcs_;
}

std::vector<uint32_t> WriteJob::slot_crcs() {
    std::lock_guard lock(engine_.mu_);
    CHECK(next_seal_ == blocks_.size());
    return slot_crcs_;
}

std::vector<uint64_t> WriteJob::non_finite() {
    std::lock_guard lock(engine_.mu_);
    return non_finite_;
}

size_t WriteJob::blocks_held_max() {
    std::lock_guard lock(engine_.mu_);
    return allowance_->held_max_;
}

}  // namespace fastckpt
