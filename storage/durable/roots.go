package durable

import (
	"cmp"
	"path/filepath"

	cstorage "go.podman.io/storage"
)

// Roots are the directories of a store of containers/storage.
type Roots struct {
	Graph string
	Run   string // may be emptied by a reboot
	// Images is the imagestore of storage.conf(5), which has images and their layers if Graph does
	// not. Graph still has containers, with layers of their own, and images from before Images was
	// set. Empty: there is none.
	Images string
}

// RootsOf returns the directories of an open store.
func RootsOf(store cstorage.Store) Roots {
	return Roots{Graph: store.GraphRoot(), Run: store.RunRoot(), Images: store.ImageStore()}
}

// ForImages returns the directory in which images and their layers are made.
func (r Roots) ForImages() string { return cmp.Or(r.Images, r.Graph) }

// All returns the directories that survive a reboot.
func (r Roots) All() []string {
	if r.Images == "" {
		return []string{r.Graph}
	}
	return []string{r.Graph, r.Images}
}

// recordFile is a file in which the library lists layers, images or containers.
type recordFile struct {
	name string // in the manifest
	path string
}

// Names of record files in a directory of the store.
const (
	layersFile     = "overlay-layers/layers.json"
	imagesFile     = "overlay-images/images.json"
	containersFile = "overlay-containers/containers.json"
)

// apart begins the names of record files in the imagestore.
const apart = "imagestore/"

// records returns the record files that survive a reboot.
func (r Roots) records() []recordFile {
	var files []recordFile
	for _, name := range []string{layersFile, imagesFile, containersFile} {
		files = append(files, recordFile{name, filepath.Join(r.Graph, name)})
	}
	if r.Images != "" {
		for _, name := range []string{layersFile, imagesFile} {
			files = append(files, recordFile{apart + name, filepath.Join(r.Images, name)})
		}
	}
	return files
}
