package durable

import (
	"cmp"
	"path/filepath"

	cstorage "go.podman.io/storage"
)

// Roots are the directories of a store of containers/storage.
type Roots struct {
	Graph string
	Run   string // a reboot may empty it
	// Images is the imagestore of storage.conf(5), where images and their layers are if
	// not in Graph; containers, with layers of their own, are there all the same, and so
	// are images from before it was set. Empty: there is none.
	Images string
}

// RootsOf are the directories of an open store.
func RootsOf(store cstorage.Store) Roots {
	return Roots{Graph: store.GraphRoot(), Run: store.RunRoot(), Images: store.ImageStore()}
}

// ForImages is where images and their layers are made.
func (r Roots) ForImages() string { return cmp.Or(r.Images, r.Graph) }

// All are the directories that a reboot leaves.
func (r Roots) All() []string {
	if r.Images == "" {
		return []string{r.Graph}
	}
	return []string{r.Graph, r.Images}
}

// recordFile is one that the library lists layers, images or containers in.
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

// apart is what the names of record files in the imagestore begin with.
const apart = "imagestore/"

// records are those that live as long as the store.
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
