package artifact

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
)

// Terms are what a pull does besides.
type Terms struct {
	Ref   string                // noted in Record.Refs, of which the newest are kept; empty: none
	Check func(*Artifact) error // accepts the artifact before it is stored; nil: every one
}

// Pull stores the artifact to which src leads, under the name of src, and returns it. It does not
// fetch content that the store has. A pull that fails leaves nothing but downloads, which the next
// pull resumes. After a pull that succeeds the artifact survives a power cut.
func (s *Store) Pull(ctx context.Context, src *source.Image, terms Terms) (*Artifact, error) {
	start := time.Now()
	id := digest.FromBytes(src.Document().Content).Encoded()
	// Other pulls of the same artifact from this registry wait for this one. Pulls from other
	// registries do not: a slow registry must not delay them.
	unlock, err := s.pulling.lock(ctx, id+" "+reference.Domain(src.Name))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := s.free(id); err != nil {
		return nil, err
	}
	if a, err := s.pullPresent(ctx, id, src, terms.Ref); a != nil || err != nil {
		return a, err
	}
	if a, err := s.pullAdditional(ctx, id, src); a != nil || err != nil {
		return a, err
	}
	made := &Artifact{ID: id, Files: src.Files, Record: Record{}.withPull(src, terms.Ref), dir: s.path(artifactsName, id)}
	made.Annotations = source.AnnotationsOf(src.Document().Content)
	if err := s.crowded(made); err != nil {
		return nil, err
	}
	p, err := s.begin(made, src, terms)
	if err != nil {
		return nil, err
	}
	a, err := p.run(ctx)
	removed := os.RemoveAll(p.dir) // it exists if the pull has failed, or another one was faster
	p.downloads.End(err)
	if err != nil {
		return nil, errors.Join(err, removed, s.sweep())
	}
	if removed != nil {
		slog.WarnContext(ctx, "cannot remove files of a pull; the next start retries", "image", id, "err", removed)
	}
	slog.InfoContext(ctx, "artifact pulled", "image", id, "name", src.Name.String(), "took", time.Since(start))
	return a, nil
}

// pullPresent records the pull of an artifact that the store has, and returns it; else nil.
func (s *Store) pullPresent(ctx context.Context, id string, src *source.Image, ref string) (*Artifact, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.notePull(ctx, id, src, ref)
}

// notePull is pullPresent for callers that hold writing.
func (s *Store) notePull(ctx context.Context, id string, src *source.Image, ref string) (*Artifact, error) {
	a := s.find(id)
	if a == nil {
		return nil, nil //nolint:nilnil // see above
	}
	record := a.withPull(src, ref)
	stored, err := readRecord(s.path(artifactsName, id))
	if err != nil {
		return nil, err
	}
	signatures := trust.Union(src.Signatures, stored.Signatures)
	if a.same(record) && slices.EqualFunc(signatures, stored.Signatures, bytes.Equal) {
		slog.InfoContext(ctx, "artifact is up to date", "image", id, "name", src.Name.String())
		return a, nil
	}
	if err := s.crowded(&Artifact{ID: id, Files: a.Files, Annotations: a.Annotations, Record: record}); err != nil {
		return nil, err
	}
	if err := s.change(ctx, a, record, src.Signatures); err != nil {
		return nil, err
	}
	return s.find(id), s.unname(ctx, src.Name.String(), id)
}

// pull is the pull of an artifact that the store does not have.
type pull struct {
	store *Store
	made  *Artifact
	src   *source.Image
	terms Terms
	dir   string // becomes the artifact's directory

	missing   []source.File // one for each content that the store lacks
	downloads *download.Pull
}

func (s *Store) begin(made *Artifact, src *source.Image, terms Terms) (*pull, error) {
	for _, name := range []string{artifactsName, blobsName, pendingName} {
		if err := os.MkdirAll(s.path(name), 0o700); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp(s.path(pendingName), "pull-")
	if err != nil {
		return nil, err
	}
	return &pull{store: s, made: made, src: src, terms: terms, dir: dir, downloads: s.downloads.Begin(reference.Domain(src.Name))}, nil
}

func (p *pull) run(ctx context.Context) (*Artifact, error) {
	if err := trace.Long(ctx, "fetch artifact", p.fetchAll); err != nil {
		return nil, err
	}
	if err := trace.Call(ctx, "write artifact", p.write); err != nil {
		return nil, err
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	s := p.store
	s.writing.Lock() // all pulls wait for it: nothing below takes long
	defer s.writing.Unlock()
	if err := s.free(p.made.ID); err != nil { // an image may have taken the id meanwhile
		return nil, err
	}
	if a, err := s.notePull(ctx, p.made.ID, p.src, p.terms.Ref); a != nil || err != nil { // a pull from another registry has stored it
		return a, err
	}
	if err := s.crowded(p.made); err != nil {
		return nil, err
	}
	if err := trace.Call(ctx, "store artifact", p.commit); err != nil {
		return nil, err
	}
	s.publish(p.made)
	return p.made, s.unname(ctx, p.src.Name.String(), p.made.ID)
}

// write writes, syncs and measures the directory of the pull.
func (p *pull) write() error {
	content := p.src.Document().Content
	if err := writeSynced(filepath.Join(p.dir, manifestName), bytes.NewReader(content)); err != nil {
		return err
	}
	if err := writeRecord(p.dir, document{p.made.Record, p.src.Signatures}); err != nil {
		return err
	}
	return errors.Join(settle(filepath.Join(p.dir, filesName)), syncFile(p.dir), p.made.measure(p.dir))
}

// check asks for the artifact where it is now.
func (p *pull) check() error {
	if p.terms.Check == nil {
		return nil
	}
	fetched := *p.made
	fetched.dir = p.dir
	return p.terms.Check(&fetched)
}

// commit moves the artifact to its place.
func (p *pull) commit() error {
	place := p.store.path(artifactsName, p.made.ID)
	if err := os.RemoveAll(place); err != nil { // one that could not be read, or whose rename was not synced
		return err
	}
	if err := os.Rename(p.dir, place); err != nil {
		return err
	}
	for _, f := range p.missing { // not before: content must belong to an artifact
		err := os.Link(filepath.Join(place, filesName, f.Path), p.store.blob(f.Digest))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			slog.Warn("cannot share file of an artifact: other artifacts that have it fetch it again", "image", p.made.ID, "err", err)
		}
	}
	dir := p.store.cfg.Dir
	return errors.Join(syncFile(p.store.path(artifactsName)), syncFile(p.store.path(blobsName)), syncFile(dir), syncFile(filepath.Dir(dir)))
}

// fetchAll makes all files in the directory of the pull.
func (p *pull) fetchAll(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cfg := p.store.cfg.Settings()
	watch := progress.New(p.store.cfg.Pulls, p.src.Name.String(), cfg.ProgressTimeout, cfg.MinPullRate, p.src.Asked, cancel).Start(ctx)
	defer watch.Stop()
	if err := p.linkPresent(watch.Events); err != nil {
		return err
	}
	if err := p.checkRoom(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(max(cfg.Parallel, 1))
	for _, f := range p.missing {
		group.Go(func() error {
			err := panics.Do(ctx, "fetch file", func() error { return p.fetch(ctx, f, watch.Events) })
			if err != nil {
				return fmt.Errorf("file %q: %w", f.Path, progress.CauseOf(ctx, err))
			}
			return nil
		})
	}
	return progress.CauseOf(ctx, group.Wait())
}

// linkPresent makes the files whose content the store has. It notes one file for each other content
// in missing.
func (p *pull) linkPresent(events chan<- types.ProgressProperties) error {
	wanted := map[digest.Digest]bool{}
	for _, f := range p.made.Files {
		if wanted[f.Digest] {
			continue
		}
		blob := p.store.blob(f.Digest)
		err := p.linkPath(blob, f)
		if errors.Is(err, unix.EMLINK) { // file systems limit the number of links: other artifacts keep theirs
			err = cmp.Or(os.Remove(blob), fs.ErrNotExist)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			wanted[f.Digest] = true
			p.missing = append(p.missing, f)
		case err != nil:
			return err
		default:
			events <- types.ProgressProperties{Event: types.ProgressEventSkipped, Artifact: blobInfo(f)}
		}
	}
	return nil
}

// linkPath makes a file from content in the store.
func (p *pull) linkPath(content string, f source.File) error {
	opened, err := os.OpenFile(content, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return errors.Join(p.link(opened, f), opened.Close())
}

// link makes a file from an open file with its content. If that has no name, the error is
// fs.ErrNotExist.
func (p *pull) link(content *os.File, f source.File) error {
	info, err := content.Stat()
	if err != nil {
		return err
	}
	if info.Size() != f.Size {
		return fmt.Errorf("file %q has %d bytes, not %d as the manifest says: %w", f.Path, info.Size(), f.Size, fault.Invalid)
	}
	at := p.placeOf(f)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", content.Fd()), unix.AT_FDCWD, at, unix.AT_SYMLINK_FOLLOW)
	if err == nil || errors.Is(err, fs.ErrExist) { // it was linked to a former file with this content, which had too many links
		return nil
	}
	return &os.LinkError{Op: "link", Old: content.Name(), New: at, Err: err}
}

func (p *pull) placeOf(f source.File) string { return filepath.Join(p.dir, filesName, f.Path) }

// checkRoom refuses an artifact that does not fit on the disk, before anything is fetched.
func (p *pull) checkRoom() error {
	var missing []types.BlobInfo
	for _, f := range p.missing {
		missing = append(missing, blobInfo(f))
	}
	fits, err := p.downloads.Fits(missing)
	if err == nil && !fits {
		err = fmt.Errorf("the artifact is larger than the free space of the image store: %w", fault.Exhausted)
	}
	return err
}

// fetch fetches content, and makes all files that have it.
func (p *pull) fetch(ctx context.Context, f source.File, events chan<- types.ProgressProperties) error {
	report := func(event types.ProgressEvent, bytes int64) {
		events <- types.ProgressProperties{Event: event, Artifact: blobInfo(f), OffsetUpdate: uint64(bytes)}
	}
	report(progress.Waiting, 0)
	defer report(types.ProgressEventDone, 0)
	err := p.downloads.Fetch(ctx, p.src.Contents(), blobInfo(f), download.Watcher{
		Begins:  func() { report(types.ProgressEventNewArtifact, 0) },
		Resumed: func(bytes int64) { report(progress.Resumed, bytes) },
		Came:    func(bytes int64) { report(types.ProgressEventRead, bytes) },
		Shown:   func(*os.File, int64) error { return nil },
		Whole:   func(content *os.File) error { return p.take(content, f.Digest) },

		Connections: func(change int) { report(progress.Connections(change), 0) },
	})
	for _, same := range p.made.Files {
		if err == nil && same.Digest == f.Digest {
			err = syncFile(p.placeOf(same))
		}
	}
	return err
}

// take makes all files with a content that has been fetched, without copying it if possible.
func (p *pull) take(content *os.File, of digest.Digest) error {
	if err := content.Chmod(0o444); err != nil {
		return err
	}
	for _, f := range p.made.Files {
		if f.Digest != of {
			continue
		}
		err := p.link(content, f)
		if errors.Is(err, fs.ErrNotExist) { // and the file system cannot give it one
			err = copyFile(content, p.placeOf(f))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyFile copies an open file.
func copyFile(content *os.File, to string) error {
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return err
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Chmod(0o444), f.Close())
}

func blobInfo(f source.File) types.BlobInfo { return types.BlobInfo{Digest: f.Digest, Size: f.Size} }

// writeSynced makes a file, and syncs it.
func writeSynced(path string, content io.Reader) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err = io.Copy(f, content); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// settle makes a directory and all below it readable for everybody, and syncs them.
func settle(dir string) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		return errors.Join(os.Chmod(path, 0o755), syncFile(path)) // independent of the umask
	})
}

// syncFile syncs a file or directory.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
