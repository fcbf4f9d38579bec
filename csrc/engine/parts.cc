// How blocks wait for their turn, and how they end. See parts.h for the contract.
#include "engine/parts.h"

#include <cerrno>
#include <utility>
#include <vector>

namespace fastckpt {

namespace {

// Reports the end of an op, whose bytes were all sent if there is no error.
void end_op(Op& op, int error) {
    op.error = error;
    if (error == 0) op.done = op.nbytes;
    finish(op);
}

}  // namespace

Part::~Part() {
    if (op_ != nullptr) end_op(*op_, parts_->error());
}

bool Parts::add(Op* op) {
    const Lock lock(mu_);
    if (error_ != 0) return false;
    nbytes_ += op->nbytes;
    pieces_[op->offset].op = op;
    if (op->offset == at_) next_is_here_.notify_one();
    return true;
}

int Parts::add(std::string copy, uint64_t offset) {
    Lock lock(mu_);
    has_room_.wait(lock, [&]() REQUIRES(mu_) {
        return copied_bytes_ <= copies_max_ || offset == at_ || error_ != 0;
    });
    if (error_ != 0) return error_;
    nbytes_ += copy.size();
    copied_bytes_ += copy.size();
    pieces_[offset].copy = std::move(copy);
    if (offset == at_) next_is_here_.notify_one();
    return 0;
}

std::unique_ptr<Part> Parts::take(int* error) {
    Piece piece;
    {
        Lock lock(mu_);
        next_is_here_.wait(lock, [&]() REQUIRES(mu_) {
            return pieces_.count(at_) > 0 || is_whole_ || error_ != 0;
        });
        *error = error_;
        if (error_ != 0) return nullptr;
        const auto found = pieces_.find(at_);
        if (found == pieces_.end()) {  // a client that is told of an end would complete the object
            *error = at_ == nbytes_ ? 0 : ESPIPE;
            return nullptr;
        }
        piece = std::move(found->second);
        pieces_.erase(found);
        copied_bytes_ -= piece.copy.size();
        const uint64_t begin = at_;
        at_ += piece.op != nullptr ? piece.op->nbytes : piece.copy.size();
        if (piece.op != nullptr && piece.op->nbytes == part_bytes_ && begin % part_bytes_ == 0)
            return std::make_unique<Part>(shared_from_this(), piece.op);
    }
    has_room_.notify_all();
    if (piece.op == nullptr) return std::make_unique<Part>(std::move(piece.copy));
    auto part = std::make_unique<Part>(
        std::string(reinterpret_cast<const char*>(piece.op->data), piece.op->nbytes));
    end_op(*piece.op, 0);
    return part;
}

void Parts::end() {
    const Lock lock(mu_);
    is_whole_ = true;
    next_is_here_.notify_one();
}

void Parts::fail(int error) {
    std::map<uint64_t, Piece> pieces;
    {
        const Lock lock(mu_);
        if (error_ == 0) error_ = error;
        error = error_;
        pieces.swap(pieces_);
        copied_bytes_ = 0;
        next_is_here_.notify_one();
        has_room_.notify_all();
    }
    for (auto& [offset, piece] : pieces)
        if (piece.op != nullptr) end_op(*piece.op, error);
}

void Parts::withdraw(const Patience* job) {
    std::vector<Op*> withdrawn;
    {
        const Lock lock(mu_);
        for (auto it = pieces_.begin(); it != pieces_.end();) {
            Op* const op = it->second.op;
            const bool is_its = op != nullptr && op->patience == job;
            if (is_its) withdrawn.push_back(op);
            it = is_its ? pieces_.erase(it) : std::next(it);
        }
    }
    for (Op* op : withdrawn) end_op(*op, ECANCELED);
}

int Parts::error() {
    const Lock lock(mu_);
    return error_;
}

uint64_t Parts::nbytes() {
    const Lock lock(mu_);
    return nbytes_;
}

uint64_t Parts::taken() {
    const Lock lock(mu_);
    return at_;
}

void PartsSink::submit(Op* op) {
    if (!parts_->add(op)) FileSink::submit(op);
}

void PartsSink::withdraw(const Patience* job) {
    const auto parts = parts_;  // the end of an op may end this
    FileSink::withdraw(job);
    parts->withdraw(job);
}

Again PartsSink::handle(Op& op) {
    end_op(op, parts_->error());
    return std::nullopt;
}

}  // namespace fastckpt
