package artifact

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

// former is the store in the graph root from before images got a directory of their own. Its
// artifacts are not listed. It is deleted when no root file system uses one of them.
type former struct {
	dir     string
	ids     map[string]bool
	adopted bool // the users are known
}

// findFormer returns the store in dir, or nil if there is none or dir is another path of the
// present store.
func (cfg *Config) findFormer(ctx context.Context) *former {
	there, err := os.Stat(cfg.Former)
	if cfg.Former == "" || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, dir := range append([]string{cfg.Dir}, cfg.Additional...) {
		used, err := read(ctx, newRemote(readPatience), dir, func() (os.FileInfo, error) { return os.Stat(dir) })
		if filepath.Clean(dir) == filepath.Clean(cfg.Former) || err == nil && os.SameFile(used, there) {
			return nil
		}
	}
	entries, err := os.ReadDir(filepath.Join(cfg.Former, artifactsName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		slog.Warn("cannot read the artifacts in the graph root, from before there was an imagestore; they stay", "err", err)
		return nil
	}
	f := &former{dir: cfg.Former, ids: map[string]bool{}}
	for _, entry := range entries {
		f.ids[entry.Name()] = true
	}
	return f
}

// has reports whether the former store has an artifact. The caller holds the mu of the Store.
func (f *former) has(id string) bool { return f != nil && f.ids[id] }

// dropFormer removes the former store if nobody uses it.
func (s *Store) dropFormer(ctx context.Context) {
	s.mu.Lock()
	f := s.former
	used := f == nil || !f.adopted
	if !used {
		for id := range f.ids {
			used = used || len(s.users[id]) > 0
		}
	}
	if !used {
		s.former = nil
	}
	s.mu.Unlock()
	if used {
		return
	}
	if err := os.RemoveAll(f.dir); err != nil {
		slog.WarnContext(ctx, "cannot remove the artifacts in the graph root, from before there was an imagestore; the next start retries", "dir", f.dir, "err", err)
		return
	}
	slog.InfoContext(ctx, "removed the artifacts in the graph root, from before there was an imagestore", "dir", f.dir, "artifacts", len(f.ids))
}
